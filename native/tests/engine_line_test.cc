// Several nodes share a line by what is owed to each, and none gets more than its own way carries.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "engine/line.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::abs(b); }

void shares_follow_what_is_owed() {
  std::vector<Claim> claims{{.owed = 30}, {.owed = 10}, {.owed = 0, .own = 7}};
  share_out(100, claims);
  CHECK(near(claims[0].allowed, 75) && claims[0].by_the_line);
  CHECK(near(claims[1].allowed, 25) && claims[1].by_the_line);
  CHECK(claims[2].allowed == 7 && !claims[2].by_the_line);
}

void what_a_slow_way_leaves_goes_to_the_others() {
  std::vector<Claim> claims{{.owed = 10, .own = 4}, {.owed = 10, .own = 200}, {.owed = 10}};
  share_out(100, claims);
  CHECK(claims[0].allowed == 4 && !claims[0].by_the_line);
  CHECK(near(claims[1].allowed, 48) && claims[1].by_the_line);
  CHECK(near(claims[2].allowed, 48) && claims[2].by_the_line);
}

void a_line_that_nobody_knows_limits_nobody() {
  std::vector<Claim> claims{{.owed = 10, .own = 4}, {.owed = 10}};
  share_out(0, claims);
  CHECK(claims[0].allowed == 4 && claims[1].allowed == 0);
  CHECK(!claims[0].by_the_line && !claims[1].by_the_line);
}

void a_line_that_all_ways_together_do_not_fill_limits_nobody() {
  std::vector<Claim> claims{{.owed = 10, .own = 4}, {.owed = 30, .own = 5}};
  share_out(100, claims);
  CHECK(claims[0].allowed == 4 && claims[1].allowed == 5);
  CHECK(!claims[0].by_the_line && !claims[1].by_the_line);
}

// Whatever is owed: the line is never exceeded, no way either, and the line is full unless all ways are.
void nothing_is_exceeded_and_nothing_wasted(unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> some(0.1, 10);
  std::vector<Claim> claims(1 + random() % 9);
  for (Claim& claim : claims) {
    claim.owed = some(random);
    claim.own = random() % 4 == 0 ? 0 : some(random);
  }
  const double line = 2 * some(random);
  share_out(line, claims);
  double sum = 0;
  bool all_at_their_own = true;
  for (const Claim& claim : claims) {
    sum += claim.allowed;
    CHECK(claim.allowed > 0 && (claim.own == 0 || claim.allowed <= claim.own * (1 + 1e-9)));
    all_at_their_own &= !claim.by_the_line;
  }
  CHECK(sum <= line * (1 + 1e-9));
  CHECK(all_at_their_own || near(sum, line));
}

}  // namespace

int main() {
  shares_follow_what_is_owed();
  what_a_slow_way_leaves_goes_to_the_others();
  a_line_that_nobody_knows_limits_nobody();
  a_line_that_all_ways_together_do_not_fill_limits_nobody();
  for (unsigned seed = 0; seed < 1000; ++seed) {
    const int before = atoll_test::failures();
    nothing_is_exceeded_and_nothing_wasted(seed);
    if (atoll_test::failures() != before) std::fprintf(stderr, "seed %u\n", seed);
  }
  return atoll_test::failures() == 0 ? 0 : 1;
}
