// How fast the links to one node may send, all together, or those to all far nodes: what they were
// seen to carry, and a little more. A sender that does not know the rate of a long way fills its
// queue until packets are lost, again and again; one that keeps to it loses little.
//
// What counts is the third of an op's bytes that went fastest. The average of all has the first
// round trips in it, in which TCP only begins: a limit made of that is met, and never grows. In a
// time as short as a round trip, however, answers that come late and together look like a faster way.
//
// A way that was bad when it was measured, and is well again, is found out while an op runs: if for
// some round trips the links carry all that they were allowed, and no queue builds, it grows.
//
// Losses do not count: where packets are lost at random, many links that keep to their share of
// the way's rate hardly notice, while one that runs ahead is thrown back by each.
//
// Owner: Connections, or one of its Neighbours. Threads: the loop's. Failure: none; too little says
// nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/clock.h"

namespace atoll_core::engine {

// Shorter ways need no pace: there the queue is answered at once, and a pause of a process looks
// like a slow link.
inline constexpr Seconds kLongWay{0.01};

class Pace {
 public:
  // What the way looks like: the least round trip that was seen, whether packets queue now, and the
  // share of them that it loses by itself.
  struct Way {
    Seconds round_trip{0};
    bool queued = false;
    double loss = 0;
  };

  // The links have carried so much by now, all together since they are there. Told several times
  // in a round trip, while an op runs.
  void saw(std::uint64_t bytes, Time now);
  // Likewise: whether they carried all that they were allowed since the last call (bytes per second;
  // 0: no limit), for some round trips, and could more. Then whatever set that may grow.
  bool held_back(std::uint64_t bytes, Time now, const Way& way, double allowed);
  // Not again before its effect can be seen.
  void grow(Time now, Seconds round_trip);
  // What the op saw counts from now on.
  void op_ended(Seconds round_trip);

  // Of all links together; 0: unknown yet, no limit.
  double bytes_per_s() const { return limit_; }

 private:
  struct Sample {
    Time at;
    std::uint64_t bytes = 0;
  };

  // Of the fastest part, in bytes per second; 0 if it was too short to tell.
  double best(Seconds round_trip) const;

  std::vector<Sample> samples_;  // of this op, at least `spacing_` apart
  Clock::duration spacing_{};
  Sample judged_;  // since when it is looked whether the op is held back; `at` 0: not yet
  double allowed_bytes_ = 0;  // since then
  Time told_at_{};
  Time judged_from_{};
  Time grows_from_{};
  std::array<double, 8> seen_{};  // of the last ops: one that was slowed by other things says little
  std::size_t next_ = 0;
  double limit_ = 0;
};

}  // namespace atoll_core::engine
