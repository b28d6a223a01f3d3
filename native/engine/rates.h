// What the links of an op were seen to carry: bytes over the time in which something was under way.
//
// Owner: a Transfer. Threads: the loop's. Failure: none; what is too little to tell a rate is left
// out.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/clock.h"
#include "engine/registry.h"

namespace atoll_core::engine {

// Counts the time during which at least one thing is under way, and the bytes that arrived.
class Meter {
 public:
  void begin(Time now);
  void end(Time now, std::size_t bytes);
  // Every time that something was under way, the first byte took a `round_trip` to be answered:
  // that is no time of the link's rate. 0: too few bytes to tell.
  double bytes_per_s(Seconds round_trip, Time now) const;

 private:
  std::uint64_t under_way_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t spells_ = 0;
  Clock::duration busy_{};
  Time since_{};
};

class Rates {
 public:
  explicit Rates(std::size_t num_nodes) : up_(num_nodes), down_(num_nodes) {}

  // A piece goes out; then it is acked, or its link breaks (0 bytes).
  void sending(std::uint32_t to, Time now);
  void sent(std::uint32_t to, std::size_t bytes, Time now);
  // A payload begins to come in; then it is there, or its link breaks (0 bytes).
  void receiving(std::uint32_t from, Time now);
  void received(std::uint32_t from, std::size_t bytes, Time now);

  // What the system knows of the way to a node; 0: unknown.
  struct Way {
    Seconds round_trip{0};
    double loss = 0;
  };
  // From and to node `self`, one by one and all together.
  std::vector<LinkRate> report(std::uint32_t self, Time now,
                               const std::function<Way(std::uint32_t)>& way_to) const;

 private:
  std::vector<Meter> up_, down_;  // by node
  Meter all_up_, all_down_;
};

}  // namespace atoll_core::engine
