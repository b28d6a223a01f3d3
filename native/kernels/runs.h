// From blocks to runs: the loops that the table of loops.h holds, for any block codec. Whole blocks
// get their length as a constant. Included by targets.cc only.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/block.h"
#include "kernels/loops.h"
#include "kernels/mean_int8.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace atoll_core::bodies {

// To memory without a detour: an ordinary store first reads the line that it is about to overwrite,
// and pushes out of the caches what is still needed. Others see it after wait_for_memory().
ATOLL_INLINE void copy_past_cache(const float* __restrict values, std::size_t count,
                                  float* __restrict out) {
#if defined(__SSE2__)
  if (reinterpret_cast<std::uintptr_t>(out) % 16 == 0 && count % 4 == 0) {
    for (std::size_t i = 0; i < count; i += 4) _mm_stream_ps(out + i, _mm_loadu_ps(values + i));
    return;
  }
#endif
  std::memcpy(out, values, count * sizeof *out);
}

// Calls `block(element, byte, count)` for each block of a run, until one returns false.
template <class C, class Block>
ATOLL_INLINE bool each_block(std::size_t count, const Block& block) {
  constexpr std::size_t kBlock = C::kBlock, kBytes = C::bytes(C::kBlock);
  std::size_t element = 0, byte = 0;
  for (; count - element >= kBlock; element += kBlock, byte += kBytes) {
    if (!block(element, byte, kBlock)) return false;
  }
  return element == count || block(element, byte, count - element);
}

// In four places of the run by turns: the processor reads ahead in each of them while it works in
// the others. From memory a vector is thus encoded in three quarters of the time.
template <class C>
ATOLL_INLINE bool encode_run(const float* values, std::size_t count, std::uint8_t* out) {
  constexpr std::size_t kPlaces = 4, kBlock = C::kBlock, kBytes = C::bytes(C::kBlock);
  const std::size_t each = count / kBlock / kPlaces;
  bool finite = true;
  for (std::size_t i = 0; i < each && finite; ++i) {
    for (std::size_t block = i; block < kPlaces * each; block += each)
      finite &= C::encode(values + block * kBlock, kBlock, out + block * kBytes);
  }
  const std::size_t done = kPlaces * each;
  values += done * kBlock;
  out += done * kBytes;
  return finite && each_block<C>(count - done * kBlock,
                                 [&](std::size_t element, std::size_t byte, std::size_t size)
                                     ATOLL_INLINED {
                                       return C::encode(values + element, size, out + byte);
                                     });
}

template <class C>
ATOLL_INLINE void decode_run(const std::uint8_t* data, std::size_t count, float* out) {
  each_block<C>(count, [&](std::size_t element, std::size_t byte, std::size_t size) ATOLL_INLINED {
    C::decode(data + byte, size, out + element);
    return true;
  });
}

ATOLL_INLINE void wait_for_memory() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// For vectors larger than the caches: a fifth faster.
template <class C>
ATOLL_INLINE void decode_past_cache_run(const std::uint8_t* data, std::size_t count, float* out) {
  each_block<C>(count, [&](std::size_t element, std::size_t byte, std::size_t size) ATOLL_INLINED {
    alignas(64) float values[C::kBlock];
    C::decode(data + byte, size, values);
    copy_past_cache(values, size, out + element);
    return true;
  });
  wait_for_memory();
}

template <class C>
ATOLL_INLINE bool finite_run(const std::uint8_t* data, std::size_t count) {
  return each_block<C>(count, [&](std::size_t, std::size_t byte, std::size_t size) ATOLL_INLINED {
    float values[C::kBlock];
    C::decode(data + byte, size, values);
    return largest_bits(values, size) < kInfinityBits;
  });
}

// Codecs that add up two blocks in one pass: most sums are of two, and then nothing is added to
// what was only just stored.
template <class C>
concept SumsTwo = requires(const std::uint8_t* data, float* sum) {
  C::sum_two(data, 1.0f, data, 1.0f, std::size_t{1}, sum);
};

// The weighted sum of one block of all contributions, `at` bytes into each.
template <class C>
ATOLL_INLINE void sum_block(const Contributions& from, std::size_t at, std::size_t size,
                            float* sum) {
  std::size_t k = 0;
  if constexpr (SumsTwo<C>) {
    C::sum_two(from.data[0] + at, from.weights[0], from.data[1] + at, from.weights[1], size, sum);
    k = 2;
  } else {
    std::memset(sum, 0, size * sizeof *sum);
  }
  for (; k < from.count; ++k) {
    // Keeps GCC from jamming several contributions into one loop, which it then fails to vectorise.
    asm volatile("" : : "r"(sum) : "memory");
    C::add(from.data[k] + at, size, from.weights[k], sum);
  }
}

ATOLL_INLINE void divide(float* values, std::size_t count, float by) {
  if (is_power_of_two(by)) {
    const float inverse = 1.0f / by;
    for (std::size_t i = 0; i < count; ++i) values[i] *= inverse;
  } else {
    for (std::size_t i = 0; i < count; ++i) values[i] /= by;
  }
}

template <class C>
ATOLL_INLINE bool reduce_run(const Contributions& from, std::size_t offset, std::size_t count,
                             std::uint8_t* out) {
  if constexpr (std::is_same_v<C, Int8>) {
    for (; count >= Int8Means::kElements; count -= Int8Means::kElements) {
      if (!Int8Means::encode(from, offset, out)) return false;
      offset += Int8Means::kBytes;
      out += Int8Means::kBytes;
    }
  }
  return each_block<C>(count, [&](std::size_t, std::size_t byte, std::size_t size) ATOLL_INLINED {
    float sum[C::kBlock];
    sum_block<C>(from, offset + byte, size, sum);
    divide(sum, size, from.total_weight);
    return C::encode(sum, size, out + byte);
  });
}

// delta + beta * residual, each operation rounded by itself.
ATOLL_INLINE void with_residual(const float* __restrict delta, const float* __restrict residual,
                                float beta, std::size_t count, float* __restrict sum) {
  for (std::size_t i = 0; i < count; ++i) sum[i] = delta[i] + beta * residual[i];
}

template <class C>
ATOLL_INLINE bool encode_fed_run(const float* delta, const float* residual, float beta,
                                 std::size_t count, std::uint8_t* out) {
  return each_block<C>(count,
                       [&](std::size_t element, std::size_t byte, std::size_t size) ATOLL_INLINED {
                         float values[C::kBlock];
                         with_residual(delta + element, residual + element, beta, size, values);
                         return C::encode(values, size, out + byte);
                       });
}

template <class C>
ATOLL_INLINE void update_residual_run(const float* delta, float beta, const std::uint8_t* data,
                                      std::size_t count, float* residual) {
  each_block<C>(count, [&](std::size_t element, std::size_t byte, std::size_t size) ATOLL_INLINED {
    float values[C::kBlock], sent[C::kBlock];
    with_residual(delta + element, residual + element, beta, size, values);
    C::decode(data + byte, size, sent);
    for (std::size_t i = 0; i < size; ++i) residual[element + i] = values[i] - sent[i];
    return true;
  });
}

}  // namespace atoll_core::bodies
