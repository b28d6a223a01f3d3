// Time inside the engine: this machine's monotonic clock, never compared with another machine's.
#pragma once

#include <chrono>

namespace atoll_core::engine {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Seconds = std::chrono::duration<double>;

// Durations from outside may be huge; a century is long enough and does not overflow.
inline Clock::duration to_duration(Seconds seconds) {
  constexpr Seconds kLongest{3.0e9};
  return std::chrono::duration_cast<Clock::duration>(seconds < kLongest ? seconds : kLongest);
}

}  // namespace atoll_core::engine
