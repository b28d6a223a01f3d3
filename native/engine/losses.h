// How many packets a way loses by itself, which no sender can help: not those that a full queue
// drops, since there slower sending, or fewer connections, are the cure.
//
// Owner: a Neighbour of Connections. Threads: the loop's. Failure: none; too little tells nothing.
#pragma once

#include <cstdint>

#include "engine/clock.h"

namespace atoll_core::engine {

class Losses {
 public:
  // So many segments with data have gone out since the last call, so many of them once more;
  // `queued`: packets queue on the way now.
  void saw(std::uint64_t sent, std::uint64_t again, bool queued, Time now, Seconds round_trip);
  // What is older counts half from now on.
  void op_ended();
  // 0 to 1; 0 too if too few segments were seen.
  double share() const;

 private:
  double sent_ = 0;
  double again_ = 0;
  Time counts_from_{};
};

}  // namespace atoll_core::engine
