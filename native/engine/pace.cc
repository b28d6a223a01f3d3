#include "engine/pace.h"

#include <algorithm>
#include <utility>

namespace atoll_core::engine {
namespace {

constexpr std::size_t kMostSamples = 512;
constexpr std::uint64_t kParts = 3;
constexpr double kRoundTrips = 1;  // that a part takes at least; who has less never fills the way
constexpr double kHeadroom = 1.05;  // finds out when there is a little more
// An op that came so close to its limit was held back by it: then the next may try much more.
constexpr double kReached = 0.97;
constexpr double kGrowth = 1.5;
// Within an op that is judged so often: in so many round trips the queue shows that grows where the
// way carries a little less than the pace allows.
constexpr double kJudgedRoundTrips = 6;
constexpr Seconds kJudgedAtLeast{0.15};
// After it has grown, answers are to older packets for so long.
constexpr double kSettling = 2;

Seconds judged_after(Seconds round_trip) {
  return std::max(kJudgedRoundTrips * round_trip, kJudgedAtLeast);
}

}  // namespace

bool Pace::held_back(std::uint64_t bytes, Time now, const Way& way, double allowed) {
  const Seconds since_told = now - std::exchange(told_at_, now);
  if (now < judged_from_) return false;
  if (judged_.at == Time{} || allowed <= 0) {
    judged_ = {now, bytes};
    allowed_bytes_ = 0;
    return false;
  }
  allowed_bytes_ += allowed * since_told.count();
  if (Seconds(now - judged_.at) < judged_after(way.round_trip)) return false;
  const auto carried = static_cast<double>(bytes - judged_.bytes);
  const bool all = !way.queued && carried >= kReached * (1 - way.loss) * allowed_bytes_;
  judged_ = {now, bytes};
  allowed_bytes_ = 0;
  if (all) {
    judged_ = {};
    judged_from_ = now + to_duration(kSettling * way.round_trip);
  }
  return all;
}

void Pace::grow(Time now, Seconds round_trip) {
  if (now < grows_from_) return;
  limit_ *= kGrowth;
  grows_from_ = now + to_duration(kSettling * round_trip + judged_after(round_trip));
}

void Pace::saw(std::uint64_t bytes, Time now) {
  if (!samples_.empty() && now - samples_.back().at < spacing_) return;
  samples_.push_back({now, bytes});
  if (samples_.size() < kMostSamples) return;
  // A long op: every second one is enough.
  std::size_t kept = 0;
  for (std::size_t i = 0; i < samples_.size(); i += 2) samples_[kept++] = samples_[i];
  samples_.resize(kept);
  spacing_ = 2 * (samples_.back().at - samples_.front().at) / kMostSamples;
}

double Pace::best(Seconds round_trip) const {
  if (samples_.empty()) return 0;
  const std::uint64_t part = (samples_.back().bytes - samples_.front().bytes) / kParts;
  double best = 0;
  std::size_t end = 0;
  for (const Sample& begin : samples_) {
    while (end < samples_.size() && samples_[end].bytes < begin.bytes + part) ++end;
    if (end == samples_.size()) break;
    const Seconds took = samples_[end].at - begin.at;
    if (took < kRoundTrips * round_trip || took <= Seconds(0)) return 0;
    best = std::max(best, static_cast<double>(samples_[end].bytes - begin.bytes) / took.count());
  }
  return best;
}

void Pace::op_ended(Seconds round_trip) {
  const double rate = best(round_trip);
  samples_.clear();
  spacing_ = {};
  judged_ = {};
  judged_from_ = grows_from_ = {};
  if (rate <= 0) return;
  seen_[next_] = rate;
  next_ = (next_ + 1) % seen_.size();
  const bool held_back = limit_ > 0 && rate >= kReached * limit_;
  limit_ = (held_back ? kGrowth : kHeadroom) * *std::ranges::max_element(seen_);
}

}  // namespace atoll_core::engine
