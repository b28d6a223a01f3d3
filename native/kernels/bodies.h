// What the inner loops of the outer step and of the digests do, element by element. Plain loops
// that compilers vectorise; always_inline lets one body be compiled for every instruction set.
// Included by targets.cc only. The codecs' are in block.h, block_*.h and runs.h.
#pragma once

#include <cstring>

#include "kernels/block.h"
#include "kernels/loops.h"

namespace atoll_core::bodies {

// ---- the outer step and norms ----

ATOLL_INLINE void outer_step(float* anchor, float* velocity, const float* mean, std::size_t count,
                             float lr, float momentum, bool nesterov) {
  if (momentum == 0.0f) {
    for (std::size_t i = 0; i < count; ++i) anchor[i] -= lr * mean[i];
  } else if (nesterov) {
    for (std::size_t i = 0; i < count; ++i) {
      const float v = momentum * velocity[i] + mean[i];
      velocity[i] = v;
      anchor[i] -= lr * (mean[i] + momentum * v);
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const float v = momentum * velocity[i] + mean[i];
      velocity[i] = v;
      anchor[i] -= lr * v;
    }
  }
}

// Eight sums, element i in sum i % 8, added pairwise at the end: the order is fixed, whatever the
// vector width.
ATOLL_INLINE double squared_norm(const float* values, std::size_t count) {
  constexpr std::size_t kLanes = 8;
  double sum[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      sum[lane] += value * value;
    }
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) {
    const double value = values[i];
    sum[lane] += value * value;
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// ---- fingerprints: splitmix64 over (position, bits), its two halves summed apart ----

inline constexpr std::uint64_t kMixA = 0xbf58476d1ce4e5b9;
inline constexpr std::uint64_t kMixB = 0x94d049bb133111eb;

ATOLL_INLINE Digest digest_words(const void* words, std::size_t count, std::uint64_t key) {
  const auto* from = static_cast<const std::uint8_t*>(words);
  std::uint64_t a = 0, b = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, from + 4 * i, 4);
    std::uint64_t mixed = key + i * kKeyStep + word;
    mixed = (mixed ^ (mixed >> 30)) * kMixA;
    mixed ^= mixed >> 27;
    a += mixed;
    mixed *= kMixB;
    b += mixed ^ (mixed >> 31);
  }
  return {a, b};
}

// Cheaper: every word passes this twice on each node. A change of one word always changes `b`;
// words that change places change `a`. Products of halves, since few processors multiply 64 bits at
// once.
ATOLL_INLINE Digest checksum_words(const void* words, std::size_t count, std::uint64_t key) {
  const auto* from = static_cast<const std::uint8_t*>(words);
  std::uint64_t a = 0, b = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    const std::uint64_t mixed = key + i * kKeyStep + word;
    a += (mixed & 0xffffffff) * (mixed >> 32);
    b += mixed;
  }
  return {a, b};
}

}  // namespace atoll_core::bodies
