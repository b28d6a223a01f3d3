// Which instruction sets this processor has, and the choice among the loops compiled for them.
#include <atomic>
#include <vector>

#include "kernels/loops.h"

namespace atoll_core {
namespace {

std::vector<const Loops*> detect() {
  std::vector<const Loops*> found = {&baseline::kLoops};
#if ATOLL_X86_64_TARGETS
  const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_v3) found.push_back(&v3::kLoops);
  if (has_v4) found.push_back(&v4::kLoops);
#endif
  return found;
}

const std::vector<const Loops*>& targets() {
  static const std::vector<const Loops*> found = detect();
  return found;
}

std::atomic<const Loops*>& chosen() {
  static std::atomic<const Loops*> loops{targets().back()};
  return loops;
}

}  // namespace

std::span<const Loops* const> available_targets() { return targets(); }

const Loops& loops() { return *chosen().load(std::memory_order_relaxed); }

bool use_target(std::string_view name) {
  for (const Loops* candidate : targets()) {
    if (candidate->target == name) {
      chosen().store(candidate);
      return true;
    }
  }
  return false;
}

}  // namespace atoll_core
