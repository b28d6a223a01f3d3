#include "kernels/outer.h"

#include "kernels/float_mode.h"
#include "kernels/loops.h"

namespace atoll_core {

void outer_step(std::span<float> anchor, std::span<float> velocity, std::span<const float> mean,
                OuterRule rule) {
  const FloatMode mode;
  loops().outer_step(anchor.data(), velocity.data(), mean.data(), anchor.size(), rule.lr,
                     rule.momentum, rule.nesterov);
}

double squared_norm(std::span<const float> values) {
  const FloatMode mode;
  return loops().squared_norm(values.data(), values.size());
}

}  // namespace atoll_core
