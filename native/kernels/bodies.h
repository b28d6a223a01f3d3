// What the inner loops do, element by element. Plain loops that compilers vectorise; always_inline
// lets one body be compiled for every instruction set. Included by targets.cc only.
#pragma once

#include <cstring>
#include <limits>

#include "kernels/loops.h"

#define ATOLL_INLINE [[gnu::always_inline]] inline

namespace atoll_core::bodies {

static_assert(std::numeric_limits<float>::is_iec559 && sizeof(float) == 4);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the wire is little-endian, and so are we");

inline constexpr std::int32_t kInfinityBits = 0x7f800000;
inline constexpr std::size_t kBlock = 256;

// ---- codecs: what is done to one block of `count <= kBlock` elements ----

// The largest magnitude, as bits: integers compare as the floats do, and NaN comes after infinity.
ATOLL_INLINE std::int32_t largest_bits(const float* values, std::size_t count) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t bits = __builtin_bit_cast(std::int32_t, values[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

struct Fp32 {
  static constexpr std::size_t bytes(std::size_t count) { return 4 * count; }

  ATOLL_INLINE static bool encode(const float* __restrict values, std::size_t count,
                                  std::uint8_t* __restrict out) {
    if (largest_bits(values, count) >= kInfinityBits) return false;
    std::memcpy(out, values, bytes(count));
    return true;
  }
  ATOLL_INLINE static void decode(const std::uint8_t* __restrict data, std::size_t count,
                                  float* __restrict out) {
    std::memcpy(out, data, bytes(count));
  }
  ATOLL_INLINE static void add(const std::uint8_t* __restrict data, std::size_t count, float weight,
                               float* __restrict sum) {
    for (std::size_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, data + 4 * i, 4);
      sum[i] += weight * value;
    }
  }
};

struct Int8 {
  static constexpr std::size_t kHeader = 4;
  static constexpr std::size_t bytes(std::size_t count) { return kHeader + count; }

  // absmax / 127, cut to 17 significant bits: times a 7-bit code it fits 24, so decoding is exact
  // and never overflows. Cutting makes it smaller by less than 2^-16, and 127 * (1 + 2^-16) still
  // rounds to 127: codes need no clamp.
  ATOLL_INLINE static float scale_of(std::int32_t largest) {
    const float exact = __builtin_bit_cast(float, largest) / 127.0f;
    return __builtin_bit_cast(float, __builtin_bit_cast(std::int32_t, exact) & ~0x7f);
  }

  ATOLL_INLINE static float value_of(std::uint8_t code) {
    return static_cast<float>(static_cast<std::int8_t>(code));
  }

  ATOLL_INLINE static bool encode(const float* __restrict values, std::size_t count,
                                  std::uint8_t* __restrict out) {
    const std::int32_t largest = largest_bits(values, count);
    if (largest >= kInfinityBits) return false;
    const float scale = scale_of(largest);
    if (scale < std::numeric_limits<float>::min()) {
      std::memset(out, 0, bytes(count));
      return true;
    }
    std::memcpy(out, &scale, kHeader);
    const float inverse = 1.0f / scale;
    // Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits.
    constexpr float kRound = 12582912.0f;
    std::uint8_t* __restrict codes = out + kHeader;
    for (std::size_t i = 0; i < count; ++i) {
      codes[i] = static_cast<std::uint8_t>(
          __builtin_bit_cast(std::uint32_t, values[i] * inverse + kRound));
    }
    return true;
  }
  ATOLL_INLINE static void decode(const std::uint8_t* __restrict data, std::size_t count,
                                  float* __restrict out) {
    float scale;
    std::memcpy(&scale, data, kHeader);
    const std::uint8_t* __restrict codes = data + kHeader;
    for (std::size_t i = 0; i < count; ++i) out[i] = value_of(codes[i]) * scale;
  }
  ATOLL_INLINE static void add(const std::uint8_t* __restrict data, std::size_t count, float weight,
                               float* __restrict sum) {
    float scale;
    std::memcpy(&scale, data, kHeader);
    const std::uint8_t* __restrict codes = data + kHeader;
    for (std::size_t i = 0; i < count; ++i) sum[i] += weight * (value_of(codes[i]) * scale);
  }
};

// ---- codecs: runs of blocks; whole blocks get their length as a constant ----

template <class C>
ATOLL_INLINE bool encode_run(const float* values, std::size_t count, std::uint8_t* out) {
  for (; count >= kBlock; count -= kBlock, values += kBlock, out += C::bytes(kBlock)) {
    if (!C::encode(values, kBlock, out)) return false;
  }
  return count == 0 || C::encode(values, count, out);
}

template <class C>
ATOLL_INLINE void decode_run(const std::uint8_t* data, std::size_t count, float* out) {
  for (; count >= kBlock; count -= kBlock, data += C::bytes(kBlock), out += kBlock) {
    C::decode(data, kBlock, out);
  }
  if (count > 0) C::decode(data, count, out);
}

template <class C>
ATOLL_INLINE bool reduce_block(const Contributions& from, std::size_t offset, std::size_t count,
                               std::uint8_t* out) {
  float sum[kBlock] = {};
  for (std::size_t k = 0; k < from.count; ++k) {
    C::add(from.data[k] + offset, count, from.weights[k], sum);
    // Keeps GCC from jamming several contributions into one loop, which it then fails to vectorise.
    asm volatile("" : : "r"(sum) : "memory");
  }
  for (std::size_t i = 0; i < count; ++i) sum[i] /= from.total_weight;
  return C::encode(sum, count, out);
}

template <class C>
ATOLL_INLINE bool reduce_run(const Contributions& from, std::size_t offset, std::size_t count,
                             std::uint8_t* out) {
  for (; count >= kBlock; count -= kBlock, offset += C::bytes(kBlock), out += C::bytes(kBlock)) {
    if (!reduce_block<C>(from, offset, kBlock, out)) return false;
  }
  return count == 0 || reduce_block<C>(from, offset, count, out);
}

// ---- the outer step and its helpers ----

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

ATOLL_INLINE void subtract(const float* anchor, const float* local, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = anchor[i] - local[i];
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

ATOLL_INLINE std::uint64_t checksum_words(const void* words, std::size_t count, std::uint64_t key) {
  const auto* from = static_cast<const std::uint8_t*>(words);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    std::uint64_t mixed = key + i * kKeyStep + word;
    mixed = (mixed ^ (mixed >> 30)) * kMixA;
    sum += mixed ^ (mixed >> 27);
  }
  return sum;
}

}  // namespace atoll_core::bodies
