// How several nodes share one line: what is sent to them all leaves by it.
//
// Owner: none, a function. Threads: any. Failure: none.
#pragma once

#include <span>

namespace atoll_core::engine {

// One node's, in bytes per second; a rate of 0 is no limit.
struct Claim {
  double owed = 0;          // how much it is still to be sent, in any unit; 0: nothing now
  double own = 0;           // what its own way carries
  double allowed = 0;       // what it gets
  bool by_the_line = false;  // which is less than its own way would carry
};

// By what is owed, so that all are done together. Whoever cannot use its share, because its own way
// carries less, leaves the rest to the others. `line` 0: unknown.
void share_out(double line, std::span<Claim> claims);

}  // namespace atoll_core::engine
