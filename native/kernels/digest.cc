#include "kernels/digest.h"

#include <algorithm>
#include <cstring>

#include "kernels/loops.h"

namespace atoll_core {
namespace {

// splitmix64's finaliser: over all 64 bits.
std::uint64_t spread(std::uint64_t sum) {
  sum = (sum ^ (sum >> 30)) * 0xbf58476d1ce4e5b9;
  sum = (sum ^ (sum >> 27)) * 0x94d049bb133111eb;
  return sum ^ (sum >> 31);
}

void add(Digest& to, Digest more) {
  to.a += more.a;
  to.b += more.b;
}

// The bytes after the last whole word, as one word padded with zeros.
template <class Word>
Word tail_word(const void* data, std::size_t size) {
  const std::size_t tail = size % sizeof(Word);
  Word word = 0;
  if (tail > 0) std::memcpy(&word, static_cast<const std::uint8_t*>(data) + (size - tail), tail);
  return word;
}

}  // namespace

std::size_t num_pieces(std::uint64_t start, std::size_t count, std::uint64_t piece) {
  return count == 0 ? 0 : (start + count - 1) / piece - start / piece + 1;
}

void digest_pieces(std::span<const float> values, std::uint64_t start, std::uint64_t piece,
                   std::span<Digest> table) {
  for (Digest& row : table) {
    const std::size_t count = std::min<std::uint64_t>(values.size(), piece - start % piece);
    add(row, loops().digest_words(values.data(), count, start * kKeyStep));
    values = values.subspan(count);
    start += count;
  }
}

std::array<std::uint8_t, 16> digest_bytes(const void* data, std::size_t size) {
  const std::size_t words = size / 4;
  const auto tail = tail_word<std::uint32_t>(data, size);
  Digest sum = loops().digest_words(data, words, 0);
  add(sum, loops().digest_words(&tail, 1, words * kKeyStep));
  sum = {spread(sum.a + size), spread(sum.b ^ spread(size))};
  std::array<std::uint8_t, 16> bytes;
  std::memcpy(bytes.data(), &sum, bytes.size());
  return bytes;
}

Checksum::Checksum(const void* data, std::uint64_t seed)
    : data_(static_cast<const std::uint8_t*>(data)), key_(spread(seed + kKeyStep)) {}

void Checksum::advance(std::size_t size) {
  const std::size_t words = size / 8;
  add(sum_,
      loops().checksum_words(data_ + 8 * words_, words - words_, key_ + words_ * kKeyStep));
  words_ = words;
}

std::uint64_t Checksum::finish(std::size_t size) {
  advance(size);
  const auto tail = tail_word<std::uint64_t>(data_, size);
  add(sum_, loops().checksum_words(&tail, 1, key_ + words_ * kKeyStep));
  return spread(sum_.a + spread(sum_.b ^ spread(size)));
}

std::uint64_t checksum64(const void* data, std::size_t size, std::uint64_t seed) {
  return Checksum(data, seed).finish(size);
}

}  // namespace atoll_core
