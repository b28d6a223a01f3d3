// A rate that is kept: bytes may pass as time goes by, and what passed too early is made up for.
//
// Owner: Connections, one for each direction. Threads: the loop's. Failure: none.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/clock.h"

namespace atoll_core::engine {

class Bucket {
 public:
  // 0: no limit.
  explicit Bucket(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  bool limited() const { return bytes_per_s_ > 0; }

  // How much may pass now, at most `wanted`.
  std::int64_t allows(std::int64_t wanted, Time now) {
    if (!limited()) return wanted;
    const double elapsed_s = std::min(Seconds(now - filled_at_).count(), kMemory.count());
    filled_at_ = now;
    bytes_ = std::min(bytes_ + elapsed_s * bytes_per_s_, kMemory.count() * bytes_per_s_);
    return bytes_ >= 1 ? std::min(wanted, static_cast<std::int64_t>(bytes_)) : 0;
  }
  void take(std::int64_t bytes) {
    if (limited()) bytes_ -= static_cast<double>(bytes);
  }

 private:
  // Unused time counts for so long: enough for late ticks, too short for a burst to matter.
  static constexpr Seconds kMemory{0.05};

  double bytes_per_s_;
  double bytes_ = 0;  // below 0: a debt
  Time filled_at_{};
};

}  // namespace atoll_core::engine
