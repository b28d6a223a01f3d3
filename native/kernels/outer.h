// The arithmetic of a commit: outer step and norm. Plain IEEE operations, never
// fused, so that every member computes the same bits.
//
// Owner: nobody. Threads: any, one per buffer. They cannot fail. Arrays do not overlap unless they
// are equal.
#pragma once

#include <cstddef>
#include <span>

namespace atoll_core {

struct OuterRule {
  float lr;
  float momentum;
  bool nesterov;
};

// In place: v = momentum * v + mean; anchor = anchor - lr * (mean + momentum * v) with Nesterov,
// else anchor - lr * v. Without momentum: anchor - lr * mean, and the velocity is not touched.
void outer_step(std::span<float> anchor, std::span<float> velocity, std::span<const float> mean,
                OuterRule rule);

// Sum of squares in fp64: eight interleaved sums, added pairwise. Not finite if any value is not.
double squared_norm(std::span<const float> values);

}  // namespace atoll_core
