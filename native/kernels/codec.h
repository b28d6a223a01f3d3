// How numbers are written on the wire, and the one formula by which they are averaged.
//
// A vector is cut into segments (`boundaries`), a segment into blocks; blocks restart at every
// segment. Wire bytes are block after block, little-endian, no padding between them. x is an
// element, x' what it decodes to; fl() is one rounding to fp32, half to even.
//
// Grid codecs. Odd, 0 -> 0, idempotent to the bit, and each |x - x'| has a bound.
//
//   fp32  the elements' bytes.
//   bf16  the upper half of each, rounded half to even.     |x - x'| <= 2^-8 |x|   (normal x)
//   fp16  IEEE half, rounded half to even.                  |x - x'| <= max(2^-11 |x|, 2^-25)
//         Both refuse what would round to infinity: from 65520 on for fp16.
//   int8  an fp32 scale s, then one int8 code per element. s = fl(absmax / 127) with its low 7 bits
//         cleared, so that q * s is exact for every code q; q = round_half_even(fl(x * fl(1 / s)));
//         x' = q * s. A block whose s would be zero or subnormal becomes all zeros, s = 0.
//         |x - x'| <= s / 2 * (1 + 2^-15).
//   int4  the same with 7 for 127 and 3 cleared bits; the code of element i is the nibble i % 2 of
//         byte i / 2 (low one first), in two's complement.
//   e3m0  an fp32 scale s = absmax, then nibbles as in int4: bit 3 is the sign, bits 0 to 2 a level
//         c: 0 for 0, else 2^(c-7) s. The nearest level, ties away from 0; 0 has no sign. A block
//         with s < 2^-120, whose lowest level would be subnormal, becomes all zeros, s = 0.
//         |x - x'| <= |x| / 3 where |x| >= s / 64, else s / 128 (a rounding of 2^-20 apart).
//
// Codebook codecs. A block has up to four values of its own, the codebook: fp32 means of the
// elements that share a code. Neither odd nor idempotent, but |x - x'|^2 = |x|^2 - |x'|^2 over a
// block: never longer than x, and a block with one value only is exact. They want error feedback.
//
//   stat2 the codebook (16 bytes), then 2-bit codes, four a byte, low bits first. With mean m and
//         deviation d of the block: code = number of thresholds m - 2.25 d, m - 0.75 d, m + 0.75 d
//         below x (that is round((x - m) / 1.5 d) + 2 within 0..3). Sums in fp64, element i in sum
//         i % 8, added pairwise; thresholds and means are rounded to fp32 once.
//   topk  the 64 largest magnitudes of each 4096 elements (of equal ones the first), all in a
//   (256) shorter block; their values by stat2's rule: codebook (16 bytes), then a stream of 14-bit
//         entries in order of position: 12 bits of position, 2 of code. All other x' are 0.
//
// The reduction formula: fp32, each operation rounded by itself, contributions in plan order, those
// of weight 0 left out.
//
//   acc = +0;  for each contribution:  acc = fl(acc + fl(fl(weight) * x'))
//   out = encode(fl(acc / fl(sum of weights)))
//
// A single contribution is copied instead: who only passes on must not round again.
// The engine applies it to chunks and `weighted_mean` to whole vectors: same code, same bits.
//
// Error feedback: what the codec dropped is kept in a residual e and sent later.
//
//   encode:    out = encode(fl(delta + fl(beta * e)))
//   at commit: e   = fl(fl(delta + fl(beta * e)) - x')
//
// Owner: nobody, all functions are pure. Threads: any. Failure: `false` means that a value was not
// finite (or would not be, encoded), and the output is unspecified. Malformed arguments are the
// caller's to exclude; malformed *bytes* decode to something, within the bounds of the output.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/digest.h"

namespace atoll_core {

enum class Codec : std::uint8_t {
  kFp32,
  kBf16,
  kFp16,
  kInt8,
  kInt4,
  kE3m0,
  kStat2,
  kTopk64,
  kTopk256
};
inline constexpr std::size_t kNumCodecs = 9;

// Element positions where segments begin, from 0 to the length of the vector; never decreasing.
using Boundaries = std::span<const std::int64_t>;

struct CodecLayout {
  std::string_view name;
  std::int64_t block;         // elements
  std::int64_t kept;          // elements of a block that are written, at most
  std::int64_t header_bytes;  // per block
  std::int64_t bits;          // per kept element

  constexpr std::int64_t block_bytes(std::int64_t numel) const {
    return header_bytes + (std::min(numel, kept) * bits + 7) / 8;
  }
  // Bytes of `numel` elements that begin at a block boundary and lie in one segment.
  constexpr std::int64_t run_bytes(std::int64_t numel) const {
    const std::int64_t tail = numel % block;
    return numel / block * block_bytes(block) + (tail > 0 ? block_bytes(tail) : 0);
  }
};

inline constexpr std::array<CodecLayout, kNumCodecs> kLayouts = {{
    {.name = "fp32", .block = 256, .kept = 256, .header_bytes = 0, .bits = 32},
    {.name = "bf16", .block = 256, .kept = 256, .header_bytes = 0, .bits = 16},
    {.name = "fp16", .block = 256, .kept = 256, .header_bytes = 0, .bits = 16},
    {.name = "int8", .block = 256, .kept = 256, .header_bytes = 4, .bits = 8},
    {.name = "int4", .block = 256, .kept = 256, .header_bytes = 4, .bits = 4},
    {.name = "e3m0", .block = 256, .kept = 256, .header_bytes = 4, .bits = 4},
    {.name = "stat2", .block = 4096, .kept = 4096, .header_bytes = 16, .bits = 2},
    {.name = "topk", .block = 4096, .kept = 64, .header_bytes = 16, .bits = 14},
    {.name = "topk256", .block = 4096, .kept = 256, .header_bytes = 16, .bits = 14},
}};

constexpr const CodecLayout& layout(Codec codec) {
  return kLayouts[static_cast<std::size_t>(codec)];
}

std::optional<Codec> find_codec(std::string_view name);
// "fp32, bf16, ...": for messages.
std::string codec_names();

// Checks for what comes from outside; everything below takes their truth for granted.
bool valid_boundaries(Boundaries boundaries);
bool is_block_boundary(Codec codec, Boundaries boundaries, std::int64_t position);

// Bytes before element `position`, a block boundary, in the encoded vector.
std::int64_t byte_offset(Codec codec, Boundaries boundaries, std::int64_t position);
// Bytes of elements [start, stop), both block boundaries.
std::int64_t range_bytes(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop);

// In all of these, `start` and `stop` are block boundaries, and pointers point at the first element
// or byte *of the range*, not of the vector. No alignment is asked for.
[[nodiscard]] bool encode_range(Codec codec, Boundaries boundaries, std::int64_t start,
                                std::int64_t stop, const float* values, std::uint8_t* out);
void decode_range(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
                  const std::uint8_t* data, float* out);
// As many weights as contributions; their sum fits 64 bits and is not zero. `out` may be one of the
// contributions. `checksum`, if there is one, is of `out` and hears of its bytes as they come.
[[nodiscard]] bool reduce_range(Codec codec, Boundaries boundaries, std::int64_t start,
                                std::int64_t stop,
                                std::span<const std::uint8_t* const> contributions,
                                std::span<const std::uint64_t> weights, std::uint8_t* out,
                                Checksum* checksum = nullptr);

// Error feedback, each in one pass. Encoding leaves the residual as it is: `data`, what was encoded
// from the same `delta`, `beta` and `residual`, moves it on once it has been committed.
[[nodiscard]] bool encode_range_with_feedback(Codec codec, Boundaries boundaries,
                                              std::int64_t start, std::int64_t stop,
                                              const float* delta, const float* residual, float beta,
                                              std::uint8_t* out);
void update_residual(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
                     const float* delta, float beta, const std::uint8_t* data, float* residual);

}  // namespace atoll_core
