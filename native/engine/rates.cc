#include "engine/rates.h"

#include <algorithm>

namespace atoll_core::engine {
namespace {

constexpr std::uint64_t kEnoughBytes = 256u << 10;  // of less, one late wake-up would tell the rate
constexpr Seconds kShortest{1e-4};

}  // namespace

void Meter::begin(Time now) {
  if (under_way_++ > 0) return;
  since_ = now;
  ++spells_;
}

void Meter::end(Time now, std::size_t bytes) {
  if (under_way_ == 0) return;  // it began before the op did
  bytes_ += bytes;
  if (--under_way_ == 0) busy_ += now - since_;
}

double Meter::bytes_per_s(Seconds round_trip, Time now) const {
  if (bytes_ < kEnoughBytes) return 0.0;
  const Seconds busy = busy_ + (under_way_ > 0 ? now - since_ : Clock::duration(0));
  // Never more than half of it: then the answers were quicker than the round trip says.
  const Seconds waited = std::min(static_cast<double>(spells_) * round_trip, busy / 2);
  return static_cast<double>(bytes_) / std::max(busy - waited, kShortest).count();
}

void Rates::sending(std::uint32_t to, Time now) {
  up_[to].begin(now);
  all_up_.begin(now);
}

void Rates::sent(std::uint32_t to, std::size_t bytes, Time now) {
  up_[to].end(now, bytes);
  all_up_.end(now, bytes);
}

void Rates::receiving(std::uint32_t from, Time now) {
  down_[from].begin(now);
  all_down_.begin(now);
}

void Rates::received(std::uint32_t from, std::size_t bytes, Time now) {
  down_[from].end(now, bytes);
  all_down_.end(now, bytes);
}

std::vector<LinkRate> Rates::report(std::uint32_t self, Time now,
                                    const std::function<Way(std::uint32_t)>& way_to) const {
  std::vector<LinkRate> rates;
  Seconds least{0};
  const auto add = [&](std::int64_t from, std::int64_t to, double rate, const Way& way) {
    if (rate > 0) rates.push_back({from, to, rate, way.round_trip.count(), way.loss});
  };
  for (std::uint32_t node = 0; node < up_.size(); ++node) {
    if (node == self) continue;
    const Way way = way_to(node);
    const Seconds rtt = way.round_trip;
    if (rtt > Seconds(0) && (least == Seconds(0) || rtt < least)) least = rtt;
    add(self, node, up_[node].bytes_per_s(rtt, now), way);
    add(node, self, down_[node].bytes_per_s(Seconds(0), now), {rtt});
  }
  add(self, kAllNodes, all_up_.bytes_per_s(least, now), {});
  add(kAllNodes, self, all_down_.bytes_per_s(Seconds(0), now), {});
  return rates;
}

}  // namespace atoll_core::engine
