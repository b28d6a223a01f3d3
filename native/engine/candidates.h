// Where a node may be found: its addresses, as it tells them, in the order in which to try them.
//
// Threads: any; find_candidates() may block for as long as the system's resolver does, which is half
// a minute where a name server hangs. Failure: kSystem, with the errno.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/socket.h"
#include "engine/status.h"

namespace atoll_core::engine {

inline constexpr std::size_t kMostCandidates = 8;  // more are left out

struct Candidate {
  Address address;
  std::string text;  // "10.0.0.1 port 7000", for people; unlike that of any other
};

// `hosts` is one host, or several separated by commas: each with `port`, or with one of its own:
// "10.0.0.1,[2001:db8::1]:7000,host.example:7001". An IPv6 address without brackets has none. Names
// are looked up. It fails if nothing is found.
Status find_candidates(const std::string& hosts, std::uint16_t port, std::vector<Candidate>* out);

// Only those that are numbers, at once. What else `hosts` has is for find_candidates(), one by one.
void numeric_candidates(const std::string& hosts, std::uint16_t port, std::vector<Candidate>* out,
                        std::vector<std::string>* others);

// Those that are not in `to` yet, as far as there is room.
void add_candidates(const std::vector<Candidate>& found, std::vector<Candidate>* to);

}  // namespace atoll_core::engine
