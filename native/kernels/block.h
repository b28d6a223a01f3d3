// What the codecs of one block have in common: magnitudes, and codes of a few bits in bytes.
// Plain loops that compilers vectorise; always_inline lets one body be compiled for every
// instruction set. Included by targets.cc only.
//
// A block codec has kBlock and bytes(count), and for one block of `count <= kBlock` elements:
// encode (false: a value is not finite, or would not be), decode, and add, which does
// sum += weight * decoded.
#pragma once

#include <cstring>
#include <limits>

#include "kernels/codec.h"

#define ATOLL_INLINE [[gnu::always_inline]] inline
#define ATOLL_INLINED __attribute__((always_inline))  // for lambdas, after their parameters

namespace atoll_core::bodies {

static_assert(std::numeric_limits<float>::is_iec559 && sizeof(float) == 4);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the wire is little-endian, and so are we");

inline constexpr std::int32_t kInfinityBits = 0x7f800000;
inline constexpr std::int32_t kMagnitude = 0x7fffffff;

template <Codec kCodec>
struct Layout {
  static constexpr std::size_t kBlock = static_cast<std::size_t>(layout(kCodec).block);
  static constexpr std::size_t kHeader = static_cast<std::size_t>(layout(kCodec).header_bytes);
  static constexpr std::size_t bytes(std::size_t count) {
    return static_cast<std::size_t>(layout(kCodec).block_bytes(static_cast<std::int64_t>(count)));
  }
};

ATOLL_INLINE std::int32_t bits_of(float value) { return __builtin_bit_cast(std::int32_t, value); }
ATOLL_INLINE float float_of(std::int32_t bits) { return __builtin_bit_cast(float, bits); }

// Of a positive number that is not a denormal. Dividing by a power of two is multiplying by its
// inverse, to the bit, and several times faster.
ATOLL_INLINE bool is_power_of_two(float value) { return (bits_of(value) & 0x007fffff) == 0; }

// The largest magnitude, as bits: integers compare as the floats do, and NaN comes after infinity.
ATOLL_INLINE std::int32_t largest_bits(const float* values, std::size_t count) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t bits = bits_of(values[i]) & kMagnitude;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Codes of 4 or 2 bits, one per byte, from and to bytes that hold several, the first one lowest.
// The last byte is filled up from `codes`, which is that much longer.
ATOLL_INLINE void pack_nibbles(const std::uint8_t* __restrict codes, std::size_t count,
                               std::uint8_t* __restrict out) {
  for (std::size_t i = 0; i < (count + 1) / 2; ++i) {
    std::uint16_t two;
    std::memcpy(&two, codes + 2 * i, 2);
    out[i] = static_cast<std::uint8_t>(two | (two >> 4));
  }
}
ATOLL_INLINE void unpack_nibbles(const std::uint8_t* __restrict data, std::size_t count,
                                 std::uint8_t* __restrict codes) {
  for (std::size_t i = 0; i < (count + 1) / 2; ++i) {
    const std::uint32_t byte = data[i];
    const auto two = static_cast<std::uint16_t>((byte | (byte << 4)) & 0x0f0f);
    std::memcpy(codes + 2 * i, &two, 2);
  }
}
ATOLL_INLINE void pack_pairs(const std::uint8_t* __restrict codes, std::size_t count,
                             std::uint8_t* __restrict out) {
  for (std::size_t i = 0; i < (count + 3) / 4; ++i) {
    std::uint32_t four;
    std::memcpy(&four, codes + 4 * i, 4);
    out[i] = static_cast<std::uint8_t>(four | (four >> 6) | (four >> 12) | (four >> 18));
  }
}
ATOLL_INLINE void unpack_pairs(const std::uint8_t* __restrict data, std::size_t count,
                               std::uint8_t* __restrict codes) {
  for (std::size_t i = 0; i < (count + 3) / 4; ++i) {
    const std::uint32_t byte = data[i];
    const std::uint32_t four = (byte | (byte << 6) | (byte << 12) | (byte << 18)) & 0x03030303;
    std::memcpy(codes + 4 * i, &four, 4);
  }
}

}  // namespace atoll_core::bodies
