// Blocks whose few values are means of their elements: stat2 and topk. See block.h; included by
// targets.cc only.
#pragma once

#include <cmath>

#include "kernels/block.h"

namespace atoll_core::bodies {

// A sum of `term(i)` in fp64 whose order is fixed, whatever the vector width: element i goes to
// lane i % 8, lanes are added pairwise.
template <class Term>
ATOLL_INLINE double ordered_sum(std::size_t count, const Term& term) {
  constexpr std::size_t kLanes = 8;
  double sum[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sum[lane] += term(i + lane);
  }
  for (std::size_t lane = 0; lane < count % kLanes; ++lane) sum[lane] += term(i + lane);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// Four values, each the mean of the elements that share a code.
struct Codebook {
  static constexpr std::size_t kBytes = 16;
  float v0, v1, v2, v3;

  ATOLL_INLINE float operator[](std::int32_t code) const {
    const float low = code & 1 ? v1 : v0, high = code & 1 ? v3 : v2;
    return code & 2 ? high : low;
  }
  ATOLL_INLINE void write(std::uint8_t* out) const {
    const float values[] = {v0, v1, v2, v3};
    std::memcpy(out, values, kBytes);
  }
  ATOLL_INLINE static Codebook read(const std::uint8_t* data) {
    float values[4];
    std::memcpy(values, data, kBytes);
    return {values[0], values[1], values[2], values[3]};
  }
};

// Gives each of `count` finite values a code, and each code the mean of its values.
ATOLL_INLINE Codebook quantise(const float* __restrict values, std::size_t count,
                               std::uint8_t* __restrict codes) {
  const auto as_it_is = [&](std::size_t i) ATOLL_INLINED -> double { return values[i]; };
  const auto squared = [&](std::size_t i) ATOLL_INLINED -> double {
    const double value = values[i];
    return value * value;
  };
  const auto n = static_cast<double>(count);
  const double sum = ordered_sum(count, as_it_is);
  const double mean = sum / n;
  const double variance = ordered_sum(count, squared) / n - mean * mean;
  const double deviation = std::sqrt(variance > 0.0 ? variance : 0.0);
  const auto t0 = static_cast<float>(mean - 2.25 * deviation);
  const auto t1 = static_cast<float>(mean - 0.75 * deviation);
  const auto t2 = static_cast<float>(mean + 0.75 * deviation);

  for (std::size_t i = 0; i < count; ++i) {
    const float value = values[i];
    codes[i] = static_cast<std::uint8_t>((value > t0) + (value > t1) + (value > t2));
  }
  // Of the values above a threshold: their sum and their number. What lies between two is the rest.
  const auto sum_above = [&](float threshold) ATOLL_INLINED {
    const auto above = [&](std::size_t i) ATOLL_INLINED -> double {
      return values[i] > threshold ? values[i] : 0.0f;
    };
    return ordered_sum(count, above);
  };
  const auto count_above = [&](std::uint8_t code) ATOLL_INLINED {
    std::int32_t found = 0;
    for (std::size_t i = 0; i < count; ++i) found += codes[i] > code ? 1 : 0;
    return found;
  };
  const double a0 = sum_above(t0), a1 = sum_above(t1), a2 = sum_above(t2);
  const std::int32_t n0 = count_above(0), n1 = count_above(1), n2 = count_above(2);
  const auto mean_of = [](double total, std::int32_t found) ATOLL_INLINED {
    return found > 0 ? static_cast<float>(total / found) : 0.0f;
  };
  return {mean_of(sum - a0, static_cast<std::int32_t>(count) - n0), mean_of(a0 - a1, n0 - n1),
          mean_of(a1 - a2, n1 - n2), mean_of(a2, n2)};
}

struct Stat2 : Layout<Codec::kStat2> {
  static_assert(kHeader == Codebook::kBytes);

  ATOLL_INLINE static bool encode(const float* __restrict values, std::size_t count,
                                  std::uint8_t* __restrict out) {
    if (largest_bits(values, count) >= kInfinityBits) return false;
    std::uint8_t codes[kBlock + 3];
    quantise(values, count, codes).write(out);
    std::memset(codes + count, 0, 3);
    pack_pairs(codes, count, out + kHeader);
    return true;
  }
  ATOLL_INLINE static void decode(const std::uint8_t* __restrict data, std::size_t count,
                                  float* __restrict out) {
    const Codebook book = Codebook::read(data);
    std::uint8_t codes[kBlock + 3];
    unpack_pairs(data + kHeader, count, codes);
    for (std::size_t i = 0; i < count; ++i) out[i] = book[codes[i]];
  }
  ATOLL_INLINE static void add(const std::uint8_t* __restrict data, std::size_t count, float weight,
                               float* __restrict sum) {
    const Codebook book = Codebook::read(data);
    std::uint8_t codes[kBlock + 3];
    unpack_pairs(data + kHeader, count, codes);
    for (std::size_t i = 0; i < count; ++i) sum[i] += weight * book[codes[i]];
  }
};

// The largest magnitudes (as bits): all above `below`, and the first `ties` that are equal to it.
struct Cut {
  std::int32_t below;
  std::size_t ties;
};

ATOLL_INLINE std::size_t count_from(const std::int32_t* magnitudes, std::size_t count,
                                    std::int32_t least) {
  std::int32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += magnitudes[i] >= least ? 1 : 0;
  return static_cast<std::size_t>(found);
}

// Bisects the magnitude, which needs no more than as many passes as it has bits.
ATOLL_INLINE Cut find_cut(const std::int32_t* magnitudes, std::size_t count, std::size_t kept,
                          std::int32_t largest) {
  std::int32_t low = 0, high = largest + 1;  // at least `kept` from low on, fewer from high on
  std::size_t from_high = 0;
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    const std::size_t found = count_from(magnitudes, count, middle);
    if (found == kept) return {middle - 1, 0};
    if (found > kept) {
      low = middle;
    } else {
      high = middle;
      from_high = found;
    }
  }
  return {low, kept - from_high};
}

template <Codec kCodec>
struct TopK : Layout<kCodec> {
  using Layout<kCodec>::kBlock;
  using Layout<kCodec>::kHeader;
  static constexpr auto kKept = static_cast<std::size_t>(layout(kCodec).kept);
  static constexpr unsigned kPositionBits = 12, kEntryBits = 14;
  static_assert(kBlock == std::size_t{1} << kPositionBits && kHeader == Codebook::kBytes);
  static_assert(layout(kCodec).bits == kEntryBits);

  ATOLL_INLINE static bool encode(const float* __restrict values, std::size_t count,
                                  std::uint8_t* __restrict out) {
    std::int32_t magnitudes[kBlock];
    std::int32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      magnitudes[i] = bits_of(values[i]) & kMagnitude;
      largest = magnitudes[i] > largest ? magnitudes[i] : largest;
    }
    if (largest >= kInfinityBits) return false;
    for (std::size_t i = count; i % kGroup != 0; ++i) magnitudes[i] = -1;

    std::uint16_t positions[kKept + 1];  // one is written ahead
    float chosen[kKept];
    const std::size_t kept = choose(magnitudes, count, largest, positions);
    for (std::size_t j = 0; j < kept; ++j) chosen[j] = values[positions[j]];
    std::uint8_t codes[kKept];
    quantise(chosen, kept, codes).write(out);
    write_entries(positions, codes, kept, out + kHeader);
    return true;
  }

  ATOLL_INLINE static void decode(const std::uint8_t* __restrict data, std::size_t count,
                                  float* __restrict out) {
    std::memset(out, 0, 4 * count);
    each_entry(data, count,
               [&](std::size_t position, float value) ATOLL_INLINED { out[position] = value; });
  }
  // The other elements are 0, and adding 0 changes no sum.
  ATOLL_INLINE static void add(const std::uint8_t* __restrict data, std::size_t count, float weight,
                               float* __restrict sum) {
    each_entry(data, count, [&](std::size_t position, float value) ATOLL_INLINED {
      sum[position] += weight * value;
    });
  }

 private:
  static constexpr std::size_t kGroup = 16;

  // Positions of the largest, in rising order; returns how many. Whole groups are looked at: what
  // fills up the last one is below every magnitude.
  ATOLL_INLINE static std::size_t choose(const std::int32_t* __restrict magnitudes,
                                         std::size_t count, std::int32_t largest,
                                         std::uint16_t* __restrict positions) {
    const std::size_t wanted = count < kKept ? count : kKept;
    Cut cut = find_cut(magnitudes, count, wanted, largest);
    std::size_t kept = 0;
    for (std::size_t start = 0; start < count; start += kGroup) {
      if (count_from(magnitudes + start, kGroup, cut.below) == 0) continue;
      for (std::size_t i = start; i < start + kGroup; ++i) {
        const std::size_t above = magnitudes[i] > cut.below ? 1 : 0;
        const std::size_t tie = magnitudes[i] == cut.below && cut.ties > 0 ? 1 : 0;
        cut.ties -= tie;
        positions[kept] = static_cast<std::uint16_t>(i);
        kept += above | tie;
      }
    }
    return kept;
  }

  ATOLL_INLINE static void write_entries(const std::uint16_t* positions, const std::uint8_t* codes,
                                         std::size_t kept, std::uint8_t* out) {
    std::uint32_t pending = 0;
    unsigned bits = 0;
    for (std::size_t j = 0; j < kept; ++j) {
      const std::uint32_t code = codes[j];
      pending |= (positions[j] | (code << kPositionBits)) << bits;
      for (bits += kEntryBits; bits >= 8; bits -= 8, pending >>= 8) {
        *out++ = static_cast<std::uint8_t>(pending);
      }
    }
    if (bits > 0) *out = static_cast<std::uint8_t>(pending);
  }

  // Calls `use(position, value)` for each entry. Damaged bytes can not lead out of the block.
  template <class Use>
  ATOLL_INLINE static void each_entry(const std::uint8_t* data, std::size_t count, const Use& use) {
    const Codebook book = Codebook::read(data);
    data += kHeader;
    const std::size_t kept = count < kKept ? count : kKept;
    std::uint32_t pending = 0;
    unsigned bits = 0;
    for (std::size_t j = 0; j < kept; ++j) {
      for (; bits < kEntryBits; bits += 8) pending |= static_cast<std::uint32_t>(*data++) << bits;
      const std::size_t position = pending & (kBlock - 1);
      const auto code = static_cast<std::uint8_t>((pending >> kPositionBits) & 3);
      pending >>= kEntryBits;
      bits -= kEntryBits;
      if (position < count) use(position, book[code]);
    }
  }
};

using Topk64 = TopK<Codec::kTopk64>;
using Topk256 = TopK<Codec::kTopk256>;

}  // namespace atoll_core::bodies
