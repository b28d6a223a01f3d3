#include "kernels/codec.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/float_mode.h"
#include "kernels/loops.h"

namespace atoll_core {
namespace {

constexpr std::array<CodecLayout, kNumCodecs> kLayouts = {{
    {.name = "fp32", .block = 256, .header_bytes = 0, .bits = 32},
    {.name = "int8", .block = 256, .header_bytes = 4, .bits = 8},
}};

const CodecLoops& codec_loops(Codec codec) {
  return loops().codecs[static_cast<std::size_t>(codec)];
}

// The segment that holds element `position`; the end of the vector belongs to the last one.
std::size_t segment_of(Boundaries boundaries, std::int64_t position) {
  const auto next = std::upper_bound(boundaries.begin() + 1, boundaries.end() - 1, position);
  return static_cast<std::size_t>(next - boundaries.begin()) - 1;
}

// Calls `run(element, byte, count)` for each part of [start, stop) that lies in one segment, with
// its first element and byte counted from the beginning of the range, until one returns false.
template <class Run>
bool each_run(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
              const Run& run) {
  if (start >= stop) return true;
  std::int64_t byte = 0;
  std::size_t segment = segment_of(boundaries, start);
  for (std::int64_t position = start; position < stop; ++segment) {
    const std::int64_t end = std::min(boundaries[segment + 1], stop);
    if (!run(position - start, byte, end - position)) return false;
    byte += layout(codec).run_bytes(end - position);
    position = end;
  }
  return true;
}

}  // namespace

std::int64_t CodecLayout::run_bytes(std::int64_t numel) const {
  const std::int64_t tail = numel % block;
  return numel / block * block_bytes(block) + (tail > 0 ? block_bytes(tail) : 0);
}

std::optional<Codec> find_codec(std::string_view name) {
  for (std::size_t i = 0; i < kNumCodecs; ++i) {
    if (kLayouts[i].name == name) return static_cast<Codec>(i);
  }
  return std::nullopt;
}

const CodecLayout& layout(Codec codec) { return kLayouts[static_cast<std::size_t>(codec)]; }

bool valid_boundaries(Boundaries boundaries) {
  return !boundaries.empty() && boundaries.front() == 0 &&
         std::is_sorted(boundaries.begin(), boundaries.end());
}

bool is_block_boundary(Codec codec, Boundaries boundaries, std::int64_t position) {
  if (position < 0 || position > boundaries.back()) return false;
  if (position == boundaries.back()) return true;
  return (position - boundaries[segment_of(boundaries, position)]) % layout(codec).block == 0;
}

std::int64_t byte_offset(Codec codec, Boundaries boundaries, std::int64_t position) {
  return range_bytes(codec, boundaries, 0, position);
}

std::int64_t range_bytes(Codec codec, Boundaries boundaries, std::int64_t start,
                         std::int64_t stop) {
  std::int64_t bytes = 0;
  each_run(codec, boundaries, start, stop,
           [&](std::int64_t, std::int64_t byte, std::int64_t count) {
             bytes = byte + layout(codec).run_bytes(count);
             return true;
           });
  return bytes;
}

bool encode_range(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
                  const float* values, std::uint8_t* out) {
  const FloatMode mode;
  const auto encode = codec_loops(codec).encode;
  return each_run(codec, boundaries, start, stop,
                  [&](std::int64_t element, std::int64_t byte, std::int64_t count) {
                    return encode(values + element, static_cast<std::size_t>(count), out + byte);
                  });
}

void decode_range(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
                  const std::uint8_t* data, float* out) {
  const FloatMode mode;
  const auto decode = codec_loops(codec).decode;
  each_run(codec, boundaries, start, stop,
           [&](std::int64_t element, std::int64_t byte, std::int64_t count) {
             decode(data + byte, static_cast<std::size_t>(count), out + element);
             return true;
           });
}

bool reduce_range(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
                  std::span<const std::uint8_t* const> contributions,
                  std::span<const std::uint64_t> weights, std::uint8_t* out) {
  const FloatMode mode;
  const std::vector<float> rounded(weights.begin(), weights.end());
  std::uint64_t total = 0;
  for (const std::uint64_t weight : weights) total += weight;
  const Contributions from = {contributions.data(), rounded.data(), contributions.size(),
                              static_cast<float>(total)};
  const auto reduce = codec_loops(codec).reduce;
  return each_run(codec, boundaries, start, stop,
                  [&](std::int64_t, std::int64_t byte, std::int64_t count) {
                    return reduce(from, static_cast<std::size_t>(byte),
                                  static_cast<std::size_t>(count), out + byte);
                  });
}

}  // namespace atoll_core
