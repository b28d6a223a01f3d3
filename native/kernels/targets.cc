// The loops, compiled for every instruction set that is worth it, and the choice among them.
#include <atomic>
#include <vector>

#include "kernels/bodies.h"
#include "kernels/loops.h"

#define ATOLL_INSTANCE baseline
#define ATOLL_TARGET
#define ATOLL_NAME "baseline"
#include "kernels/instance.inc"

// Neither names fma: what cannot be generated cannot be contracted (AVX-512 brings its own; there
// -ffp-contract=off holds alone).
#if defined(__x86_64__) && defined(__GNUC__)
#define ATOLL_INSTANCE v3
#define ATOLL_TARGET __attribute__((target("avx2,bmi,bmi2")))
#define ATOLL_NAME "x86-64-v3"
#include "kernels/instance.inc"

#define ATOLL_INSTANCE v4
#define ATOLL_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,prefer-vector-width=512")))
#define ATOLL_NAME "x86-64-v4"
#include "kernels/instance.inc"
#endif

namespace atoll_core {
namespace {

std::vector<const Loops*> detect() {
  std::vector<const Loops*> found = {&baseline::kLoops};
#if defined(__x86_64__) && defined(__GNUC__)
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
