// How fast links send.
#include <algorithm>

#include "engine/connections.h"
#include "engine/tcp_info.h"

namespace atoll_core::engine {
namespace {

constexpr Clock::duration kTellEvery = std::chrono::milliseconds(25);
constexpr double kQueued = 1.1;  // of the least round trip

Seconds smaller(Seconds a, Seconds b) {
  if (a == Seconds(0) || b == Seconds(0)) return std::max(a, b);  // one is unknown
  return std::min(a, b);
}

}  // namespace

Seconds Connections::round_trip(const NodeName& node) const {
  Seconds least{0};
  const auto at = neighbours_.find(node);
  if (at == neighbours_.end()) return least;
  for (const auto& slot : at->second.links)
    least = smaller(least, tcp_facts(slot->link.fd()).least_round_trip);
  return least;
}

void Connections::watch_pace(Neighbour& neighbour, Time now) {
  const bool due = !neighbour.links.empty() && now - neighbour.paced_at >= kTellEvery;
  if (due && client_->needs(neighbour.name)) tell_pace(neighbour, now);
}

Seconds Connections::tell_pace(Neighbour& neighbour, Time now) {
  Seconds round_trip{0}, present{0};
  for (const auto& slot : neighbour.links) {
    const TcpFacts facts = tcp_facts(slot->link.fd());
    neighbour.delivered_bytes += facts.delivered_bytes - slot->delivered_bytes;
    slot->delivered_bytes = facts.delivered_bytes;
    round_trip = smaller(round_trip, facts.least_round_trip);
    present = smaller(present, facts.round_trip);
  }
  neighbour.paced_at = now;
  if (round_trip < kLongWay) return round_trip;
  const bool grown = neighbour.pace.carried(neighbour.delivered_bytes, now,
                                            {round_trip, present > kQueued * round_trip});
  if (grown) keep_pace(neighbour);
  return round_trip;
}

void Connections::op_ended(const NodeName& node) {
  const auto at = neighbours_.find(node);
  if (at == neighbours_.end() || at->second.links.empty()) return;
  at->second.pace.op_ended(tell_pace(at->second, Clock::now()));
  keep_pace(at->second);
}

// Whoever is done with a chunk takes the next one: so all can have the same share.
void Connections::keep_pace(const Neighbour& neighbour) {
  const auto num_links = static_cast<double>(neighbour.links.size());
  for (const auto& slot : neighbour.links) {
    const int fd = slot->link.fd();
    if (tcp_facts(fd).least_round_trip >= kLongWay)
      set_pace(fd, neighbour.pace.bytes_per_s() / num_links);
  }
}

}  // namespace atoll_core::engine
