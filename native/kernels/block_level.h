// Blocks of small codes that count levels of one scale: int8, int4, e3m0. See block.h; included by
// targets.cc only.
#pragma once

#include "kernels/block.h"

namespace atoll_core::bodies {

// Writes the scale; false, and a block of zeros, if it is below `smallest`.
ATOLL_INLINE bool write_scale(float scale, float smallest, std::size_t bytes, std::uint8_t* out) {
  if (scale < smallest) {
    std::memset(out, 0, bytes);
    return false;
  }
  std::memcpy(out, &scale, 4);
  return true;
}

ATOLL_INLINE float read_scale(const std::uint8_t* data) {
  float scale;
  std::memcpy(&scale, data, 4);
  return scale;
}

// absmax / levels, cut so that its product with any code fits 24 bits: decoding is exact and never
// overflows. Cutting b bits makes it smaller by less than 2^(b-23), and levels * (1 + 2^(b-23))
// still rounds to levels: codes need no clamp.
ATOLL_INLINE float level_scale(std::int32_t largest, float levels, std::int32_t cut_bits) {
  return float_of(bits_of(float_of(largest) / levels) & ~((1 << cut_bits) - 1));
}

// Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits.
ATOLL_INLINE std::uint32_t rounded(float value) {
  return __builtin_bit_cast(std::uint32_t, value + 12582912.0f);
}

struct Int8 : Layout<Codec::kInt8> {
  ATOLL_INLINE static float value_of(std::uint8_t code) {
    return static_cast<float>(static_cast<std::int8_t>(code));
  }
  ATOLL_INLINE static bool encode(const float* __restrict values, std::size_t count,
                                  std::uint8_t* __restrict out) {
    return encode_within(values, count, largest_bits(values, count), out);
  }
  // `largest` is the largest magnitude, as bits.
  ATOLL_INLINE static bool encode_within(const float* __restrict values, std::size_t count,
                                         std::int32_t largest, std::uint8_t* __restrict out) {
    if (largest >= kInfinityBits) return false;
    const float scale = level_scale(largest, 127.0f, 7);
    if (!write_scale(scale, std::numeric_limits<float>::min(), bytes(count), out)) return true;
    const float inverse = 1.0f / scale;
    std::uint8_t* __restrict codes = out + kHeader;
    for (std::size_t i = 0; i < count; ++i) {
      codes[i] = static_cast<std::uint8_t>(rounded(values[i] * inverse));
    }
    return true;
  }
  ATOLL_INLINE static void decode(const std::uint8_t* __restrict data, std::size_t count,
                                  float* __restrict out) {
    const float scale = read_scale(data);
    const std::uint8_t* __restrict codes = data + kHeader;
    for (std::size_t i = 0; i < count; ++i) out[i] = value_of(codes[i]) * scale;
  }
  ATOLL_INLINE static void add(const std::uint8_t* __restrict data, std::size_t count, float weight,
                               float* __restrict sum) {
    const float scale = read_scale(data);
    const std::uint8_t* __restrict codes = data + kHeader;
    for (std::size_t i = 0; i < count; ++i) sum[i] += weight * (value_of(codes[i]) * scale);
  }
};

// Two codes a byte. `Levels` turns a value into a nibble and back, given the block's scale.
template <Codec kCodec, class Levels>
struct Nibbles : Layout<kCodec> {
  using Layout<kCodec>::kBlock;
  using Layout<kCodec>::kHeader;

  ATOLL_INLINE static bool encode(const float* __restrict values, std::size_t count,
                                  std::uint8_t* __restrict out) {
    const std::int32_t largest = largest_bits(values, count);
    if (largest >= kInfinityBits) return false;
    const float scale = Levels::scale_of(largest);
    if (!write_scale(scale, Levels::kSmallestScale, Layout<kCodec>::bytes(count), out)) return true;
    const float inverse = 1.0f / scale;
    std::uint8_t codes[kBlock + 1];
    codes[count] = 0;
    for (std::size_t i = 0; i < count; ++i) codes[i] = Levels::code_of(values[i], inverse);
    pack_nibbles(codes, count, out + kHeader);
    return true;
  }
  ATOLL_INLINE static void decode(const std::uint8_t* __restrict data, std::size_t count,
                                  float* __restrict out) {
    const float scale = read_scale(data);
    std::uint8_t codes[kBlock + 1];
    unpack_nibbles(data + kHeader, count, codes);
    for (std::size_t i = 0; i < count; ++i) out[i] = Levels::value_of(codes[i]) * scale;
  }
  ATOLL_INLINE static void add(const std::uint8_t* __restrict data, std::size_t count, float weight,
                               float* __restrict sum) {
    const float scale = read_scale(data);
    std::uint8_t codes[kBlock + 1];
    unpack_nibbles(data + kHeader, count, codes);
    for (std::size_t i = 0; i < count; ++i) {
      sum[i] += weight * (Levels::value_of(codes[i]) * scale);
    }
  }
};

struct Int4Levels {
  static constexpr float kSmallestScale = std::numeric_limits<float>::min();

  ATOLL_INLINE static float scale_of(std::int32_t largest) { return level_scale(largest, 7.0f, 3); }
  ATOLL_INLINE static std::uint8_t code_of(float value, float inverse) {
    return static_cast<std::uint8_t>(rounded(value * inverse) & 15);
  }
  ATOLL_INLINE static float value_of(std::uint8_t code) {
    return static_cast<float>(static_cast<std::int8_t>((code ^ 8) - 8));
  }
};

struct E3m0Levels {
  static constexpr float kSmallestScale = 0x1p-120f;

  ATOLL_INLINE static float scale_of(std::int32_t largest) { return float_of(largest); }
  // Half a unit of the exponent rounds up from 1.5 * 2^e; below 2^-6 the neighbour is 0, at 2^-7.
  ATOLL_INLINE static std::uint8_t code_of(float value, float inverse) {
    const std::int32_t ratio = bits_of(value * inverse);
    const std::int32_t magnitude = ratio & kMagnitude;
    const std::int32_t level = ((magnitude + (1 << 22)) >> 23) - kLevelBias;
    const std::int32_t lowest = magnitude >= kHalfOfLowest ? 1 : 0;
    const std::int32_t code = level > lowest ? level : lowest;
    return static_cast<std::uint8_t>(code | (code > 0 ? (ratio >> 28) & 8 : 0));
  }
  ATOLL_INLINE static float value_of(std::uint8_t code) {
    const std::int32_t level = code & 7;
    const std::int32_t bits = level > 0 ? (level + kLevelBias) << 23 : 0;
    return float_of(bits | static_cast<std::int32_t>(static_cast<std::uint32_t>(code & 8) << 28));
  }

 private:
  static constexpr std::int32_t kLevelBias = 127 - 7;              // level 7 is 2^0
  static constexpr std::int32_t kHalfOfLowest = kLevelBias << 23;  // 2^-7
};

using Int4 = Nibbles<Codec::kInt4, Int4Levels>;
using E3m0 = Nibbles<Codec::kE3m0, E3m0Levels>;

}  // namespace atoll_core::bodies
