// The table by which the inner loops are called: one per instruction set, all with the same bits.
//
// Owner: nobody, tables are constants. Threads: any; `use_target` is for tests and benchmarks,
// while no kernel runs. They cannot fail. FloatMode (float_mode.h) must be in force while they run.
// "Same bits" holds because they are made of integer arithmetic, single IEEE operations per
// element, and sums in a fixed order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/codec.h"
#include "kernels/digest.h"

namespace atoll_core {

// What is summed: two or more encoded vectors (or ranges of them), and fp32 weights.
struct Contributions {
  const std::uint8_t* const* data;
  const float* weights;
  std::size_t count;
  float total_weight;
};

// Each works on a run: `count` elements that begin at a block boundary and lie in one segment.
struct CodecLoops {
  bool (*encode)(const float* values, std::size_t count, std::uint8_t* out);
  void (*decode)(const std::uint8_t* data, std::size_t count, float* out);
  void (*decode_past_cache)(const std::uint8_t* data, std::size_t count, float* out);
  // Whether all decoded values are.
  bool (*finite)(const std::uint8_t* data, std::size_t count);
  bool (*encode_fed)(const float* delta, const float* residual, float beta, std::size_t count,
                     std::uint8_t* out);
  void (*update_residual)(const float* delta, float beta, const std::uint8_t* data,
                          std::size_t count, float* residual);
  // The run begins `offset` bytes into each contribution.
  bool (*reduce)(const Contributions& from, std::size_t offset, std::size_t count,
                 std::uint8_t* out);
};

struct Loops {
  std::string_view target;
  std::array<CodecLoops, kNumCodecs> codecs;  // by Codec
  void (*outer_step)(float* anchor, float* velocity, const float* mean, std::size_t count, float lr,
                     float momentum, bool nesterov);
  double (*squared_norm)(const float* values, std::size_t count);
  // Sums over `count` words of 4 (digest) or 8 (checksum) bytes, unaligned; word i is mixed with
  // `key + i * kKeyStep`.
  Digest (*digest_words)(const void* words, std::size_t count, std::uint64_t key);
  Digest (*checksum_words)(const void* words, std::size_t count, std::uint64_t key);
};

inline constexpr std::uint64_t kKeyStep = 0x9e3779b97f4a7c15;

// Compiled apart, each for its instruction set.
#if defined(__x86_64__) && defined(__GNUC__)
#define ATOLL_X86_64_TARGETS 1
namespace v3 {
extern const Loops kLoops;
}
namespace v4 {
extern const Loops kLoops;
}
#else
#define ATOLL_X86_64_TARGETS 0
#endif
namespace baseline {
extern const Loops kLoops;
}

// What this processor can run, slowest first: "baseline", "x86-64-v3", "x86-64-v4".
std::span<const Loops* const> available_targets();
// The fastest of them, unless a test chose another.
const Loops& loops();
[[nodiscard]] bool use_target(std::string_view name);

}  // namespace atoll_core
