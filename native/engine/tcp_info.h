// What the system knows of a TCP connection. Apart from socket.cc, since the two headers that
// describe it exclude each other.
//
// Owner: nobody. Threads: any. Failure: 0 means unknown.
#pragma once

#include <cstdint>

#include "engine/clock.h"

namespace atoll_core::engine {

struct TcpFacts {
  Seconds least_round_trip{0};        // of the last minutes
  Seconds round_trip{0};              // smoothed, as it is now
  std::uint64_t delivered_bytes = 0;  // that the other end has, in order or not
  std::uint64_t sent_segments = 0;    // with data, those that went out again included
  std::uint64_t segments_again = 0;   // that went out again
};

TcpFacts tcp_facts(int fd);

}  // namespace atoll_core::engine
