// What the Python tests cannot see: ranges within a vector, the float mode, memory just outside of
// the buffers (under the address sanitizer), and calls from several threads (under the thread
// sanitizer). Laws of the codecs and equality with the numpy twins are tested in tests/unit/.
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "kernels/codec.h"
#include "kernels/digest.h"
#include "kernels/float_mode.h"
#include "kernels/loops.h"
#include "kernels/outer.h"
#include "kernels/sha256.h"
#include "tests/check.h"

namespace {

using namespace atoll_core;
using Ints = std::vector<std::int64_t>;
using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;

std::vector<Codec> all_codecs() {
  std::vector<Codec> codecs;
  for (std::size_t i = 0; i < kNumCodecs; ++i) codecs.push_back(static_cast<Codec>(i));
  return codecs;
}
const std::vector<Codec> kCodecs = all_codecs();
// Segments of 300, 0, 1, 256, 443 and 1300 elements: in the last one blocks are summed together.
const Ints kBoundaries = {0, 300, 300, 301, 557, 1000, 2300};
constexpr std::int64_t kNumel = 2300;

Floats normals(unsigned seed, std::size_t count) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

Bytes encoded(Codec codec, const Floats& values) {
  Bytes out(static_cast<std::size_t>(range_bytes(codec, kBoundaries, 0, kBoundaries.back())));
  CHECK(encode_range(codec, kBoundaries, 0, kBoundaries.back(), values.data(), out.data()));
  return out;
}

void test_layout() {
  CHECK(find_codec("int8") == Codec::kInt8);
  CHECK(find_codec("fp32") == Codec::kFp32);
  CHECK(!find_codec("int9"));
  CHECK(codec_names() == "fp32, bf16, fp16, int8, int4, e3m0, stat2, topk, topk256");
  for (const Codec codec : kCodecs) CHECK(find_codec(layout(codec).name) == codec);
  CHECK(layout(Codec::kInt8).run_bytes(0) == 0);
  CHECK(layout(Codec::kInt8).run_bytes(256) == 260);
  CHECK(layout(Codec::kInt8).run_bytes(257) == 265);
  CHECK(layout(Codec::kFp32).run_bytes(257) == 1028);
  CHECK(layout(Codec::kInt4).run_bytes(257) == 132 + 5);
  CHECK(layout(Codec::kStat2).run_bytes(4097) == 16 + 1024 + 17);
  CHECK(layout(Codec::kTopk64).run_bytes(4096 + 3) == 128 + 22);
  CHECK(byte_offset(Codec::kInt8, kBoundaries, 301) == 308 + 5);
  CHECK(range_bytes(Codec::kInt8, kBoundaries, 256, 557) == 48 + 5 + 260);

  CHECK(valid_boundaries(kBoundaries));
  CHECK(valid_boundaries(Ints{0}));
  CHECK(!valid_boundaries({}));
  CHECK(!valid_boundaries(Ints{1, 2}));
  CHECK(!valid_boundaries(Ints{0, 2, 1}));

  Ints found;
  for (std::int64_t at = -1; at <= kNumel + 1; ++at) {
    if (is_block_boundary(Codec::kInt8, kBoundaries, at)) found.push_back(at);
  }
  CHECK((found == Ints{0, 256, 300, 301, 557, 813, 1000, 1256, 1512, 1768, 2024, 2280, 2300}));
  CHECK(is_block_boundary(Codec::kInt8, Ints{0}, 0));
  CHECK(range_bytes(Codec::kInt8, Ints{0}, 0, 0) == 0);
}

// Any cut at block boundaries gives the bytes of the whole.
void test_ranges_are_parts_of_the_whole() {
  const Floats values = normals(1, kNumel), other = normals(2, kNumel);
  for (const Codec codec : kCodecs) {
    const Bytes a = encoded(codec, values), b = encoded(codec, other);
    const std::vector<std::uint64_t> weights = {3, 5};
    Bytes mean(a.size());
    const std::vector<const std::uint8_t*> whole = {a.data(), b.data()};
    CHECK(reduce_range(codec, kBoundaries, 0, kNumel, whole, weights, mean.data()));

    Ints cuts;
    for (std::int64_t at = 0; at <= kNumel; ++at) {
      if (is_block_boundary(codec, kBoundaries, at)) cuts.push_back(at);
    }
    Floats back(kNumel), residual = other, moved = other;
    decode_range(codec, kBoundaries, 0, kNumel, a.data(), back.data());
    update_residual(codec, kBoundaries, 0, kNumel, values.data(), 0.5f, a.data(), moved.data());
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      for (std::size_t j = i; j < cuts.size(); ++j) {
        const std::int64_t start = cuts[i], stop = cuts[j];
        const auto offset = byte_offset(codec, kBoundaries, start);
        Bytes part(static_cast<std::size_t>(range_bytes(codec, kBoundaries, start, stop)));
        CHECK(encode_range(codec, kBoundaries, start, stop, values.data() + start, part.data()));
        CHECK(std::equal(part.begin(), part.end(), a.begin() + offset));

        Floats some(static_cast<std::size_t>(stop - start));
        decode_range(codec, kBoundaries, start, stop, part.data(), some.data());
        CHECK(std::equal(some.begin(), some.end(), back.begin() + start));

        residual = other;
        update_residual(codec, kBoundaries, start, stop, values.data() + start, 0.5f, part.data(),
                        residual.data() + start);
        CHECK(std::equal(residual.begin() + start, residual.begin() + stop, moved.begin() + start));

        const std::vector<const std::uint8_t*> parts = {a.data() + offset, b.data() + offset};
        CHECK(reduce_range(codec, kBoundaries, start, stop, parts, weights, part.data()));
        CHECK(std::equal(part.begin(), part.end(), mean.begin() + offset));
      }
    }
  }
}

void test_not_finite_is_refused() {
  for (const Codec codec : kCodecs) {
    Bytes out(4 * kNumel);
    for (const std::size_t where : {0u, 299u, 300u, 999u, 1500u, 2299u}) {
      Floats values = normals(3, kNumel);
      values[where] = std::numeric_limits<float>::quiet_NaN();
      CHECK(!encode_range(codec, kBoundaries, 0, kNumel, values.data(), out.data()));
    }
  }
}

// Bytes that no encoder writes: under the address sanitizer nothing outside of the buffers is
// touched, and what is not finite is refused.
void test_damaged_bytes() {
  std::mt19937 generator(8);
  for (const Codec codec : kCodecs) {
    const Bytes good = encoded(codec, normals(7, kNumel));
    for (int i = 0; i < 50; ++i) {
      Bytes damaged = good;
      for (std::uint8_t& byte : damaged) byte = static_cast<std::uint8_t>(generator());
      Floats out(kNumel);
      decode_range(codec, kBoundaries, 0, kNumel, damaged.data(), out.data());
      const std::vector<const std::uint8_t*> one = {damaged.data()}, two = {good.data(), one[0]};
      Bytes mean(good.size());
      const bool finite = reduce_range(codec, kBoundaries, 0, kNumel, one, {{1}}, mean.data());
      CHECK(finite == std::isfinite(squared_norm(out)));
      (void)reduce_range(codec, kBoundaries, 0, kNumel, two, {{1, 1}}, mean.data());
    }
  }
}

// The host program's rounding and flush-to-zero change nothing, and are as before afterwards.
void test_float_mode() {
  const Floats values = normals(4, kNumel);
  const Bytes expected = encoded(Codec::kInt8, values);
  std::fesetround(FE_UPWARD);
  const bool same = encoded(Codec::kInt8, values) == expected;
  const int rounding = std::fegetround();
  std::fesetround(FE_TONEAREST);
  CHECK(same);
  CHECK(rounding == FE_UPWARD);

#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlushToZero | kDenormalsAreZero);
  const Floats denormal(8, 1e-42f);
  Floats anchor(8), velocity(8);
  outer_step(anchor, velocity, denormal, {1.0f, 0.0f, false});
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK(anchor == Floats(8, -1e-42f));
  CHECK((after & (kFlushToZero | kDenormalsAreZero)) == (kFlushToZero | kDenormalsAreZero));
#endif
}

void test_checksum() {
  Bytes data(1000);
  std::iota(data.begin(), data.end(), std::uint8_t{0});
  for (const std::size_t size : {0u, 1u, 7u, 8u, 9u, 999u}) {
    const std::uint64_t whole = checksum64(data.data(), size);
    CHECK(whole == checksum64(data.data(), size));
    CHECK(whole != checksum64(data.data(), size + 1));
    CHECK(whole != checksum64(data.data(), size, 1));
    for (std::size_t i = 0; i < size; ++i) {
      data[i] ^= 0x10;
      CHECK(whole != checksum64(data.data(), size));
      data[i] ^= 0x10;
    }
  }
  std::swap_ranges(data.begin(), data.begin() + 8, data.begin() + 8);
  Bytes swapped = data;
  std::swap_ranges(data.begin(), data.begin() + 8, data.begin() + 8);
  CHECK(checksum64(swapped.data(), 1000) != checksum64(data.data(), 1000));
}

void test_every_target_has_the_same_bits() {
  const std::string_view fastest = loops().target;
  const Floats values = normals(5, kNumel);
  for (const Codec codec : kCodecs) {
    Bytes first_bytes;
    std::uint64_t first_sum = 0;
    for (const Loops* target : available_targets()) {
      CHECK(use_target(target->target));
      const Bytes bytes = encoded(codec, values);
      const std::uint64_t sum = checksum64(bytes.data(), bytes.size());
      if (first_bytes.empty()) first_bytes = bytes, first_sum = sum;
      CHECK(bytes == first_bytes);
      CHECK(sum == first_sum);
    }
  }
  CHECK(use_target(fastest));
  CHECK(!use_target("sparc"));
}

void test_hashes() {
  const std::string_view text = "abc";
  const std::span data(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
  const Sha256 hash = sha256(data);
  CHECK(hash[0] == 0xba && hash[1] == 0x78 && hash[31] == 0xad);
  CHECK(equal_constant_time(hash, sha256(data)));
  CHECK(!equal_constant_time(hash, hmac_sha256(data, data)));
  CHECK(!equal_constant_time(hash, data));
}

void test_several_threads() {
  const Floats values = normals(6, kNumel);
  const Bytes expected = encoded(Codec::kInt8, values);
  std::vector<std::thread> threads;
  std::vector<int> equal(4);
  for (std::size_t i = 0; i < equal.size(); ++i) {
    threads.emplace_back([&, i] { equal[i] = encoded(Codec::kInt8, values) == expected; });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(equal == std::vector<int>(4, 1));
}

}  // namespace

int main() {
  test_layout();
  test_ranges_are_parts_of_the_whole();
  test_not_finite_is_refused();
  test_damaged_bytes();
  test_float_mode();
  test_checksum();
  test_every_target_has_the_same_bits();
  test_hashes();
  test_several_threads();
  return atoll_test::failures() == 0 ? 0 : 1;
}
