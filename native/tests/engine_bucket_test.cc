// A bucket keeps its rate whatever the pattern of asking; meters count time that something is under
// way. Both on a clock that the test sets.
#include <cmath>
#include <cstdio>
#include <random>

#include "engine/bucket.h"
#include "engine/rates.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

Time at(double seconds) { return Time{} + to_duration(Seconds(seconds)); }
bool close_to(double value, double wanted, double share) {
  return std::abs(value - wanted) <= share * wanted;
}

void a_rate_is_kept_and_a_burst_is_short(unsigned seed) {
  std::mt19937 random(seed);
  const double rate = 1e5 * (1 + random() % 1000);
  Bucket bucket(rate);
  double now = 1.0, passed = 0.0;
  bucket.allows(1, at(now));
  const double begin = now;
  while (now < begin + 3.0) {
    now +=
        1e-3 * (1 + random() % 20);  // ticks that come late, but not for as long as is remembered
    while (const std::int64_t allowed = bucket.allows(64 << 10, at(now))) {
      // Sometimes more moves than was allowed: a record, a buffer.
      const std::int64_t moved = allowed + (random() % 8 == 0 ? 16 << 10 : 0);
      bucket.take(moved);
      passed += static_cast<double>(moved);
    }
  }
  const double slack_bytes = rate * 0.05 + (16 << 10);
  CHECK(std::abs(passed - rate * (now - begin)) <= slack_bytes + 0.01 * rate);
}

void idle_time_is_forgotten() {
  Bucket bucket(1e6);
  bucket.allows(1, at(1));
  CHECK(bucket.allows(1 << 30, at(100)) <= 50'000);
}

void no_rate_is_no_limit() {
  Bucket bucket(0);
  bucket.take(1 << 30);
  CHECK(!bucket.limited() && bucket.allows(4096, at(1)) == 4096);
}

void a_meter_counts_only_time_with_something_under_way() {
  Meter meter;
  meter.begin(at(1.0));
  meter.begin(at(1.5));
  meter.end(at(2.0), 500'000);
  meter.end(at(3.0), 500'000);
  meter.begin(at(50.0));
  meter.end(at(52.0), 1'000'000);
  meter.end(at(60.0), 9'000'000);  // never began here
  CHECK(close_to(meter.bytes_per_s(Seconds(0), at(60)), 2e6 / 4.0, 1e-9));
  CHECK(close_to(meter.bytes_per_s(Seconds(0.5), at(60)), 2e6 / 3.0, 1e-9));
  CHECK(close_to(meter.bytes_per_s(Seconds(100), at(60)), 2e6 / 2.0, 1e-9));
}

void too_few_bytes_tell_nothing() {
  Meter meter;
  meter.begin(at(1));
  meter.end(at(2), 1000);
  CHECK(meter.bytes_per_s(Seconds(0), at(3)) == 0.0);
}

void all_together_are_not_the_sum_of_waits() {
  Rates rates(3);
  for (const std::uint32_t node : {1u, 2u}) rates.sending(node, at(1));
  for (const std::uint32_t node : {1u, 2u}) rates.sent(node, 1'000'000, at(2));
  const auto report = rates.report(0, at(3), [](std::uint32_t) { return Rates::Way{Seconds(0), 0.01}; });
  CHECK(report.size() == 3);
  for (const LinkRate& rate : report)
    CHECK(close_to(rate.bytes_per_s, rate.to == kAllNodes ? 2e6 : 1e6, 1e-9));
  CHECK(report[0].loss == 0.01 && report[2].loss == 0);  // of single ways only
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const int before = atoll_test::failures();
    a_rate_is_kept_and_a_burst_is_short(seed);
    if (atoll_test::failures() != before) std::fprintf(stderr, "seed %u\n", seed);
  }
  idle_time_is_forgotten();
  no_rate_is_no_limit();
  a_meter_counts_only_time_with_something_under_way();
  too_few_bytes_tell_nothing();
  all_together_are_not_the_sum_of_waits();
  return atoll_test::failures() == 0 ? 0 : 1;
}
