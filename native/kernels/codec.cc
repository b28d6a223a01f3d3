#include "kernels/codec.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/float_mode.h"
#include "kernels/loops.h"

namespace atoll_core {
namespace {

constexpr std::int64_t kCacheElements = 4 << 20;  // what is larger would not stay in it anyway
// Summed at once: whole blocks of every codec that are still in cache when they are checked.
constexpr std::int64_t kCheckedElements = 16 << 10;

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

std::optional<Codec> find_codec(std::string_view name) {
  for (std::size_t i = 0; i < kNumCodecs; ++i) {
    if (kLayouts[i].name == name) return static_cast<Codec>(i);
  }
  return std::nullopt;
}

std::string codec_names() {
  std::string names;
  for (const CodecLayout& one : kLayouts) names.append(names.empty() ? "" : ", ").append(one.name);
  return names;
}

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
  const bool fits_cache = stop - start < kCacheElements;
  const auto decode =
      fits_cache ? codec_loops(codec).decode : codec_loops(codec).decode_past_cache;
  each_run(codec, boundaries, start, stop,
           [&](std::int64_t element, std::int64_t byte, std::int64_t count) {
             decode(data + byte, static_cast<std::size_t>(count), out + element);
             return true;
           });
}

bool reduce_range(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
                  std::span<const std::uint8_t* const> contributions,
                  std::span<const std::uint64_t> weights, std::uint8_t* out, Checksum* checksum) {
  const FloatMode mode;
  const CodecLoops& loops = codec_loops(codec);
  std::vector<const std::uint8_t*> counted;
  std::vector<float> rounded;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    counted.push_back(contributions[i]);
    rounded.push_back(static_cast<float>(weights[i]));
    total += weights[i];
  }
  if (counted.size() == 1) {
    const auto bytes = static_cast<std::size_t>(range_bytes(codec, boundaries, start, stop));
    std::memmove(out, counted.front(), bytes);
    return each_run(codec, boundaries, start, stop,
                    [&](std::int64_t, std::int64_t byte, std::int64_t count) {
                      return loops.finite(out + byte, static_cast<std::size_t>(count));
                    });
  }
  const Contributions from = {counted.data(), rounded.data(), counted.size(),
                              static_cast<float>(total)};
  return each_run(
      codec, boundaries, start, stop, [&](std::int64_t, std::int64_t byte, std::int64_t count) {
        while (count > 0) {
          const std::int64_t part = std::min(count, kCheckedElements);
          const auto at = static_cast<std::size_t>(byte);
          if (!loops.reduce(from, at, static_cast<std::size_t>(part), out + at)) return false;
          byte += layout(codec).run_bytes(part);
          count -= part;
          if (checksum != nullptr) checksum->advance(static_cast<std::size_t>(byte));
        }
        return true;
      });
}

bool encode_range_with_feedback(Codec codec, Boundaries boundaries, std::int64_t start,
                                std::int64_t stop, const float* delta, const float* residual,
                                float beta, std::uint8_t* out) {
  const FloatMode mode;
  const auto encode = codec_loops(codec).encode_fed;
  return each_run(codec, boundaries, start, stop,
                  [&](std::int64_t element, std::int64_t byte, std::int64_t count) {
                    return encode(delta + element, residual + element, beta,
                                  static_cast<std::size_t>(count), out + byte);
                  });
}

void update_residual(Codec codec, Boundaries boundaries, std::int64_t start, std::int64_t stop,
                     const float* delta, float beta, const std::uint8_t* data, float* residual) {
  const FloatMode mode;
  const auto update = codec_loops(codec).update_residual;
  each_run(codec, boundaries, start, stop,
           [&](std::int64_t element, std::int64_t byte, std::int64_t count) {
             update(delta + element, beta, data + byte, static_cast<std::size_t>(count),
                    residual + element);
             return true;
           });
}

}  // namespace atoll_core
