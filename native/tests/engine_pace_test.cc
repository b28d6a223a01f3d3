// A pace follows what a way carries, on a way and a clock that the test makes up.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "engine/pace.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

constexpr Seconds kRoundTrip{0.08};
constexpr double kWay = 24e6;

// TCP on a way that carries so much: it doubles its rate every round trip up to the way's or the
// pace's, whichever is less.
class Way {
 public:
  explicit Way(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  // How long it took.
  double run_op(Pace& pace, double bytes, Seconds every = Seconds(0.025)) {
    const double begun = now_;
    double rate = std::min(1e6, bytes_per_s_), queue = 0;
    for (double left = bytes; left > 0; left -= rate * every.count()) {
      const auto carried = static_cast<std::uint64_t>(carried_);
      pace.saw(carried, at(now_));
      const bool queued = queue > 0.1 * kRoundTrip.count() * bytes_per_s_;
      if (pace.held_back(carried, at(now_), {kRoundTrip, queued}, pace.bytes_per_s()))
        pace.grow(at(now_), kRoundTrip);
      const double limit = pace.bytes_per_s() > 0 ? pace.bytes_per_s() : 1e12;
      now_ += every.count();
      carried_ += std::min(left, rate * every.count());
      const double sent = std::min(rate * std::exp2(every / kRoundTrip), limit);
      queue = std::max(0.0, queue + (sent - bytes_per_s_) * every.count());
      rate = std::min(sent, bytes_per_s_);
    }
    const double took = now_ - begun;
    pace.saw(static_cast<std::uint64_t>(carried_), at(now_));
    pace.op_ended(kRoundTrip);
    now_ += 60.0;
    return took;
  }

 private:
  static Time at(double seconds) { return Time{} + to_duration(Seconds(seconds)); }

  double bytes_per_s_;
  double now_ = 1000.0;
  double carried_ = 0.0;
};

bool follows(const Pace& pace, double way) {
  return pace.bytes_per_s() >= way && pace.bytes_per_s() <= 1.15 * way;
}

void an_op_whose_beginning_was_slow_tells_the_rate_of_the_way() {
  Pace pace;
  CHECK(pace.bytes_per_s() == 0);
  Way(kWay).run_op(pace, 40e6);
  CHECK(follows(pace, kWay));
}

void the_pace_of_a_steady_way_stays() {
  Pace pace;
  Way way(kWay);
  for (int op = 0; op < 50; ++op) {
    way.run_op(pace, 40e6);
    CHECK(follows(pace, kWay));
  }
}

void a_way_that_became_faster_is_used_after_a_few_ops() {
  Pace pace;
  Way(kWay).run_op(pace, 40e6);
  Way faster(4 * kWay);
  for (int op = 0; op < 5; ++op) faster.run_op(pace, 160e6);
  CHECK(pace.bytes_per_s() >= 4 * kWay);
}

void a_way_that_became_slower_is_believed_after_eight_ops() {
  Pace pace;
  Way(kWay).run_op(pace, 40e6);
  Way slower(kWay / 4);
  for (int op = 0; op < 7; ++op) slower.run_op(pace, 40e6);
  CHECK(follows(pace, kWay));
  slower.run_op(pace, 40e6);
  CHECK(follows(pace, kWay / 4));
}

// It was measured while packets were lost, and is well now: one op finds out.
void a_way_that_got_well_again_is_used_within_an_op() {
  Pace pace;
  Way(kWay / 200).run_op(pace, 1e6);
  CHECK(pace.bytes_per_s() < kWay / 100);
  Way well(kWay);
  const double took = well.run_op(pace, 20 * kWay);
  CHECK(took < 20 + 9 * kRoundTrip.count() * (1 + std::log(200) / std::log(1.5)));
  CHECK(pace.bytes_per_s() >= kWay);
}

void what_is_too_short_to_fill_the_way_says_nothing() {
  Pace pace;
  Way way(kWay);
  way.run_op(pace, 1e6);
  CHECK(pace.bytes_per_s() == 0);
  way.run_op(pace, 40e6);
  for (int op = 0; op < 20; ++op) way.run_op(pace, 1e6);
  CHECK(follows(pace, kWay));
  pace.op_ended(kRoundTrip);  // an op that had nothing for this node
  CHECK(follows(pace, kWay));
}

void a_pause_in_an_op_is_not_the_way_s() {
  Pace pace;
  double carried = 0;
  for (int i = 0; i <= 200; ++i) {
    const double now = 1.0 + 0.025 * i + (i > 100 ? 30.0 : 0.0);  // others were late
    pace.saw(static_cast<std::uint64_t>(carried), Time{} + to_duration(Seconds(now)));
    carried += 0.025 * kWay;
  }
  pace.op_ended(kRoundTrip);
  CHECK(follows(pace, kWay));
}

void a_long_op_is_told_in_few_samples_and_as_well() {
  Pace pace;
  Way(kWay).run_op(pace, 3600 * kWay, Seconds(0.01));
  CHECK(follows(pace, kWay));
}

// Answers come late by up to half a round trip: the pace is a little high for it, not half.
void answers_that_come_together_are_no_faster_way(unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> late(0.0, kRoundTrip.count() / 2);
  Pace pace;
  double heard = 0;
  for (int i = 0; i < 80; ++i) {
    const double now = 0.025 * i;
    heard = std::max(heard, kWay * std::max(0.0, now - late(random)));
    pace.saw(static_cast<std::uint64_t>(heard), Time{} + to_duration(Seconds(1.0 + now)));
  }
  pace.op_ended(kRoundTrip);
  CHECK(pace.bytes_per_s() >= kWay && pace.bytes_per_s() <= 1.25 * kWay);
}

}  // namespace

int main() {
  an_op_whose_beginning_was_slow_tells_the_rate_of_the_way();
  the_pace_of_a_steady_way_stays();
  a_way_that_became_faster_is_used_after_a_few_ops();
  a_way_that_became_slower_is_believed_after_eight_ops();
  a_way_that_got_well_again_is_used_within_an_op();
  what_is_too_short_to_fill_the_way_says_nothing();
  a_pause_in_an_op_is_not_the_way_s();
  a_long_op_is_told_in_few_samples_and_as_well();
  for (unsigned seed = 0; seed < 200; ++seed) {
    const int before = atoll_test::failures();
    answers_that_come_together_are_no_faster_way(seed);
    if (atoll_test::failures() != before) std::fprintf(stderr, "seed %u\n", seed);
  }
  return atoll_test::failures() == 0 ? 0 : 1;
}
