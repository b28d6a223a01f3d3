// Fast fingerprints: of the state (is it the same everywhere?) and of frames (did it arrive
// whole?). They find accidents, not forgeries; proofs of identity are in sha256.h.
//
// They are sums, modulo 2^64, of a mix of (position, bits). So sums of disjoint ranges add up, and
// a change of one element is always found: the mix is one to one in the bits.
//
// Owner: nobody, all functions are pure. Threads: any. They cannot fail.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace atoll_core {

// Two sums, so that accidents that cancel in one do not cancel in the other.
struct Digest {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
};

// How many pieces of `piece` elements the elements [start, start + count) touch.
std::size_t num_pieces(std::uint64_t start, std::size_t count, std::uint64_t piece);

// Adds each element's digest to that of its piece: `values[0]` is element `start` in global
// coordinates, `table[0]` its piece, and `table` has num_pieces(...) rows.
void digest_pieces(std::span<const float> values, std::uint64_t start, std::uint64_t piece,
                   std::span<Digest> table);

// 16 bytes that depend on every byte, its position, and the length.
std::array<std::uint8_t, 16> digest_bytes(const void* data, std::size_t size);

// For frames: depends on every byte, its position, the length, and the seed.
std::uint64_t checksum64(const void* data, std::size_t size, std::uint64_t seed = 0);

// The same of bytes that come by and by: they are taken while they are still in cache.
class Checksum {
 public:
  Checksum() = default;
  explicit Checksum(const void* data, std::uint64_t seed = 0);

  // The first `size` bytes are there, no fewer than before.
  void advance(std::size_t size);
  // They are all.
  std::uint64_t finish(std::size_t size);

 private:
  const std::uint8_t* data_ = nullptr;
  std::uint64_t key_ = 0;
  std::size_t words_ = 0;  // whole ones that were taken
  Digest sum_;
};

}  // namespace atoll_core
