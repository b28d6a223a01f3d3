// Where a node may be found: its addresses, as it tells them, in the order in which to try them.
//
// Threads: any; find_candidates() may block for as long as the system's resolver does. Failure:
// kSystem, with the errno.
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
// are looked up unless `numeric_only`, when one is a failure. Otherwise it fails if nothing is found.
Status find_candidates(const std::string& hosts, std::uint16_t port, bool numeric_only,
                       std::vector<Candidate>* out);

}  // namespace atoll_core::engine
