// What a way loses by itself is told apart from what its queue drops, on a clock that the test makes
// up.
#include <cmath>
#include <cstdio>

#include "engine/losses.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

constexpr Seconds kRoundTrip{0.1};

Time at(double seconds) { return Time{} + to_duration(Seconds(seconds)); }

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::abs(b); }

void the_share_of_what_went_out_again_is_told() {
  Losses losses;
  for (int i = 0; i < 100; ++i) losses.saw(100, i % 10 == 0 ? 1 : 0, false, at(i), kRoundTrip);
  CHECK(near(losses.share(), 0.001));
}

void too_few_segments_tell_nothing() {
  Losses losses;
  losses.saw(499, 100, false, at(1), kRoundTrip);
  CHECK(losses.share() == 0);
}

// A full queue drops packets; by the time that they go out again it may be empty.
void what_a_queue_drops_does_not_count() {
  Losses losses;
  losses.saw(1000, 1, false, at(1), kRoundTrip);
  losses.saw(1000, 50, true, at(2), kRoundTrip);
  losses.saw(1000, 50, false, at(2.7), kRoundTrip);  // seven round trips later
  CHECK(near(losses.share(), 0.001));
  losses.saw(1000, 3, false, at(2.9), kRoundTrip);
  CHECK(near(losses.share(), 0.002));
}

void newer_ops_count_more() {
  Losses losses;
  losses.saw(2000, 20, false, at(1), kRoundTrip);
  losses.op_ended();
  losses.saw(1000, 0, false, at(2), kRoundTrip);
  CHECK(near(losses.share(), 0.005));
  for (int op = 0; op < 3; ++op) losses.op_ended();
  CHECK(losses.share() == 0);  // too long ago to tell
}

}  // namespace

int main() {
  the_share_of_what_went_out_again_is_told();
  too_few_segments_tell_nothing();
  what_a_queue_drops_does_not_count();
  newer_ops_count_more();
  return atoll_test::failures() == 0 ? 0 : 1;
}
