// How fast links send.
//
// What a node sends to several others shares one line, and each of those pairs sees only what it got
// of it: if all kept to the best that they ever saw, they would overflow the line together. So the
// line has a pace too, of all that goes to far nodes, and is shared out by what is still owed to
// each: then all are done together, and who is done early leaves the rest to the others.
#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/connections.h"
#include "engine/line.h"
#include "engine/tcp_info.h"

namespace atoll_core::engine {
namespace {

constexpr Clock::duration kTellEvery = std::chrono::milliseconds(25);
// Packets queue where the round trip is longer than the least one by so much; by less, answers are
// only late, as where packets get lost.
constexpr double kQueued = 0.1;  // of the least one
constexpr Seconds kQueuedAtLeast{0.005};
constexpr double kNoted = 0.02;  // so little more or less is not worth a system call for each link

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

double Connections::loss(const NodeName& node) const {
  const auto at = neighbours_.find(node);
  return at == neighbours_.end() ? 0.0 : at->second.losses.share();
}

void Connections::watch_paces(Time now) {
  if (now - paced_at_ < kTellEvery) return;
  paced_at_ = now;
  bool any = false;
  for (auto& [name, neighbour] : neighbours_) {
    if (neighbour.links.empty() || !client_->needs(name)) continue;
    any = true;
    const Pace::Way way = tell_pace(neighbour, now);
    if (way.round_trip < kLongWay ||
        !neighbour.pace.held_back(neighbour.delivered_bytes, now, way, neighbour.allowed))
      continue;
    (neighbour.shares_line ? line_ : neighbour.pace).grow(now, way.round_trip);
  }
  if (!any) return;
  line_.saw(line_bytes_, now);
  share_line();
}

Pace::Way Connections::tell_pace(Neighbour& neighbour, Time now) {
  Seconds least{0}, present{0};
  std::uint64_t delivered_bytes = 0, sent = 0, again = 0;
  for (const auto& slot : neighbour.links) {
    const TcpFacts facts = tcp_facts(slot->link.fd());
    delivered_bytes += facts.delivered_bytes - slot->facts.delivered_bytes;
    sent += facts.sent_segments - slot->facts.sent_segments;
    again += facts.segments_again - slot->facts.segments_again;
    slot->facts = facts;
    least = smaller(least, facts.least_round_trip);
    present = smaller(present, facts.round_trip);
  }
  neighbour.delivered_bytes += delivered_bytes;
  neighbour.far = least >= kLongWay;
  if (neighbour.far) {
    line_bytes_ += delivered_bytes;
    neighbour.pace.saw(neighbour.delivered_bytes, now);
  }
  const bool queued = present - least > std::max(kQueued * least, kQueuedAtLeast);
  neighbour.losses.saw(sent, again, queued, now, least);
  return {least, queued, neighbour.losses.share()};
}

void Connections::op_ended(const std::vector<NodeName>& nodes) {
  const Time now = Clock::now();
  Seconds longest{0};
  for (const NodeName& node : nodes) {
    const auto at = neighbours_.find(node);
    if (at == neighbours_.end() || at->second.links.empty()) continue;
    const Pace::Way way = tell_pace(at->second, now);
    at->second.pace.op_ended(way.round_trip);
    at->second.losses.op_ended();
    if (at->second.far) longest = std::max(longest, way.round_trip);
  }
  line_.saw(line_bytes_, now);
  line_.op_ended(longest);
  share_line();
}

void Connections::share_line() {
  std::vector<Claim> claims;
  for (auto& [name, neighbour] : neighbours_) {
    const bool sends = neighbour.far && !neighbour.links.empty();
    const std::uint64_t owed = sends ? client_->owed(name) : 0;
    claims.push_back({.owed = static_cast<double>(owed), .own = neighbour.pace.bytes_per_s()});
  }
  share_out(line_.bytes_per_s(), claims);
  std::size_t at = 0;
  for (auto& [name, neighbour] : neighbours_) {
    const Claim& claim = claims[at++];
    neighbour.shares_line = claim.by_the_line;
    const double before = std::exchange(neighbour.allowed, claim.allowed);
    if (std::abs(claim.allowed - before) > kNoted * before) keep_pace(neighbour);
  }
}

// Whoever is done with a chunk takes the next one: so all links can have the same share.
void Connections::keep_pace(const Neighbour& neighbour) {
  const auto num_links = static_cast<double>(neighbour.links.size());
  for (const auto& slot : neighbour.links) {
    const int fd = slot->link.fd();
    if (tcp_facts(fd).least_round_trip >= kLongWay) set_pace(fd, neighbour.allowed / num_links);
  }
}

}  // namespace atoll_core::engine
