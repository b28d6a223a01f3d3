// How numbers are written on the wire, and the one formula by which they are averaged.
//
// A vector is cut into segments (`boundaries`), a segment into blocks of `block` elements; blocks
// restart at every segment. Wire bytes are block after block, little-endian:
//
//   fp32  the elements' bytes.
//   int8  an fp32 scale s, then one int8 code per element. s = fl(absmax / 127) with its low 7 bits
//         cleared, so that q * s is exact for every code q; q = round_half_even(fl(x * fl(1 / s)));
//         decoded, x' = q * s. A block whose s would be zero or subnormal becomes all zeros, s = 0.
//         Hence: odd, 0 -> 0, idempotent to the bit, |x - x'| <= s / 2 * (1 + 2^-15).
//
// The reduction formula: fp32, each operation rounded by itself, contributions in plan order.
//
//   acc = +0;  for each contribution:  acc = fl(acc + fl(fl(weight) * x'))
//   out = encode(fl(acc / fl(sum of weights)))
//
// The engine applies it to chunks and `weighted_mean` to whole vectors: same code, same bits.
//
// Owner: nobody, all functions are pure. Threads: any. Failure: `false` means that a value was not
// finite, and the output is unspecified. Malformed arguments are the caller's to exclude.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace atoll_core {

enum class Codec : std::uint8_t { kFp32, kInt8 };
inline constexpr std::size_t kNumCodecs = 2;

// Element positions where segments begin, from 0 to the length of the vector; never decreasing.
using Boundaries = std::span<const std::int64_t>;

struct CodecLayout {
  std::string_view name;
  std::int64_t block;         // elements
  std::int64_t header_bytes;  // per block
  std::int64_t bits;          // per element

  std::int64_t block_bytes(std::int64_t numel) const {
    return header_bytes + (numel * bits + 7) / 8;
  }
  // Bytes of `numel` elements that begin at a block boundary and lie in one segment.
  std::int64_t run_bytes(std::int64_t numel) const;
};

std::optional<Codec> find_codec(std::string_view name);
const CodecLayout& layout(Codec codec);

// Checks for what comes from outside; everything below takes their truth for granted.
bool valid_boundaries(Boundaries boundaries);
bool is_block_boundary(Codec codec, Boundaries boundaries, std::int64_t position);

// Bytes before element `position`, a block boundary, in the encoded vector.
std::int64_t byte_offset(Codec codec, Boundaries boundaries, std::int64_t position);
// Bytes of elements [start, stop), both block boundaries.
std::int64_t range_bytes(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop);

// In all three, `start` and `stop` are block boundaries, and pointers point at the first element or
// byte *of the range*, not of the vector. No alignment is asked for.
[[nodiscard]] bool encode_range(Codec codec, Boundaries boundaries, std::int64_t start,
                                std::int64_t stop, const float* values, std::uint8_t* out);
void decode_range(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
                  const std::uint8_t* data, float* out);
// As many weights as contributions; their sum fits 64 bits and is not zero. `out` may be one of the
// contributions.
[[nodiscard]] bool reduce_range(Codec codec, Boundaries boundaries, std::int64_t start,
                                std::int64_t stop,
                                std::span<const std::uint8_t* const> contributions,
                                std::span<const std::uint64_t> weights, std::uint8_t* out);

}  // namespace atoll_core
