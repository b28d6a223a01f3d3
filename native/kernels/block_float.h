// Blocks of floats of 32 and 16 bits. See block.h; included by targets.cc only.
#pragma once

#include "kernels/block.h"

namespace atoll_core::bodies {

struct Fp32 : Layout<Codec::kFp32> {
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
  ATOLL_INLINE static void sum_two(const std::uint8_t* __restrict a, float weight_a,
                                   const std::uint8_t* __restrict b, float weight_b,
                                   std::size_t count, float* __restrict sum) {
    for (std::size_t i = 0; i < count; ++i) {
      float value_a, value_b;
      std::memcpy(&value_a, a + 4 * i, 4);
      std::memcpy(&value_b, b + 4 * i, 4);
      sum[i] = (0.0f + weight_a * value_a) + weight_b * value_b;
    }
  }
};

// A 16-bit float: `Format` says how one value is narrowed and widened, in integers and exact
// floating-point steps, so that it needs no conversion instructions.
template <Codec kCodec, class Format>
struct Half : Layout<kCodec> {
  ATOLL_INLINE static bool encode(const float* __restrict values, std::size_t count,
                                  std::uint8_t* __restrict out) {
    if (largest_bits(values, count) >= Format::kTooLarge) return false;
    for (std::size_t i = 0; i < count; ++i) {
      const auto half = static_cast<std::uint16_t>(Format::narrow(bits_of(values[i])));
      std::memcpy(out + 2 * i, &half, 2);
    }
    return true;
  }
  ATOLL_INLINE static float value_at(const std::uint8_t* data, std::size_t i) {
    std::uint16_t half;
    std::memcpy(&half, data + 2 * i, 2);
    return float_of(Format::widen(half));
  }
  ATOLL_INLINE static void decode(const std::uint8_t* __restrict data, std::size_t count,
                                  float* __restrict out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = value_at(data, i);
  }
  ATOLL_INLINE static void add(const std::uint8_t* __restrict data, std::size_t count, float weight,
                               float* __restrict sum) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += weight * value_at(data, i);
  }
};

struct Bf16Format {
  static constexpr std::int32_t kTooLarge = 0x7f7f8000;  // rounds up to infinity

  ATOLL_INLINE static std::int32_t narrow(std::int32_t bits) {
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
  ATOLL_INLINE static std::int32_t widen(std::uint16_t half) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(half) << 16);
  }
};

struct Fp16Format {
  static constexpr std::int32_t kTooLarge = 0x477ff000;        // 65520
  static constexpr std::int32_t kSmallestNormal = 0x38800000;  // 2^-14
  static constexpr std::int32_t kBias = (127 - 15) << 23;
  // 0.5 counts in units of 2^-24, fp16's smallest: adding it rounds, subtracting it is exact.
  static constexpr std::int32_t kHalfBits = 0x3f000000;

  ATOLL_INLINE static std::int32_t narrow(std::int32_t bits) {
    const std::int32_t magnitude = bits & kMagnitude;
    const std::int32_t normal = (magnitude - kBias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const std::int32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - kHalfBits;
    return ((bits >> 16) & 0x8000) | (magnitude < kSmallestNormal ? subnormal : normal);
  }
  ATOLL_INLINE static std::int32_t widen(std::uint16_t half) {
    const std::int32_t magnitude = half & 0x7fff;
    const std::int32_t normal = (magnitude << 13) + kBias;
    const std::int32_t subnormal = bits_of(float_of(magnitude | kHalfBits) - 0.5f);
    const std::int32_t finite = magnitude < 0x400 ? subnormal : normal;
    const std::int32_t value = magnitude >= 0x7c00 ? finite | kInfinityBits : finite;
    return value | static_cast<std::int32_t>(static_cast<std::uint32_t>(half & 0x8000) << 16);
  }
};

using Bf16 = Half<Codec::kBf16, Bf16Format>;
using Fp16 = Half<Codec::kFp16, Fp16Format>;

}  // namespace atoll_core::bodies
