// How ops end: by success, abort, or time.
#include <algorithm>
#include <cstdio>

#include "engine/transfers.h"

namespace atoll_core::engine {
namespace {

constexpr std::size_t kRememberedEnds = 256;
constexpr Clock::duration kSilent = std::chrono::seconds(1);  // four pings
constexpr Clock::duration kPaused = std::chrono::seconds(1);  // many ticks

std::string seconds(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", Seconds(duration).count());
  return text;
}

}  // namespace

// ---- time ----

void Transfers::on_tick(Time now) {
  if (now - last_tick_ > kPaused) awake_since_ = now;
  last_tick_ = now;
  std::vector<Transfer*> all;
  for (auto& [op, transfer] : running_) all.push_back(transfer.get());
  for (Transfer* transfer : all) {
    if (transfer->expires_at <= now) {
      expire(*transfer, now);
    } else {
      keep_alive(*transfer, now);
    }
  }
  for (const NodeName& node : silent_nodes(now)) {
    connections_.drop(node);
    on_node_lost(node, "nothing came from it for " + seconds(progress_timeout_) +
                           ", not even an answer: it is frozen, or cut off");
  }
}

// Where there are links, bytes must come: every engine answers pings, whatever it knows of an op.
// Nodes without links have the patience of Connections.
std::vector<NodeName> Transfers::silent_nodes(Time now) {
  std::vector<NodeName> silent;
  for (auto& [op, transfer] : running_) {
    const Time since = std::max(transfer->started_at, awake_since_);
    for (const std::uint32_t node : transfer->book().partners()) {
      const Time heard = connections_.last_received(transfer->name(node));
      if (heard != Time::min() && now - std::max(heard, since) > progress_timeout_)
        silent.push_back(transfer->name(node));
    }
  }
  return silent;
}

void Transfers::expire(Transfer& transfer, Time now) {
  const Edges edges = late_edges(transfer, now);
  std::string missing;
  for (const auto& [from, to] : edges) {
    missing += (missing.empty() ? "" : ", ") + to_string(transfer.name(from)) + " -> " +
               to_string(transfer.name(to));
  }
  if (missing.empty())
    missing = "chunks that their roots have not finished; the roots are alive and wait for others";
  end(transfer, false,
      "the deadline of " + seconds(transfer.expires_at - transfer.started_at) +
          " passed; still missing: " + missing,
      edges);
}

// What is late by itself is named. A finished chunk may be late only because its root still waits
// for a third node: then the root's link is named only if the root has been silent too.
Transfers::Edges Transfers::late_edges(Transfer& transfer, Time now) {
  const std::uint32_t self = transfer.layout().self;
  const Clock::duration silent = std::min(kSilent, (transfer.expires_at - transfer.started_at) / 2);
  Edges edges;
  for (const std::uint32_t node : transfer.book().partners()) {
    const Time heard = connections_.last_received(transfer.name(node));
    const bool mute = heard == Time::min() || now - heard > silent;
    const bool lacks = transfer.book().lacks_from(node);
    if (transfer.book().lacks_contributions_from(node) || (lacks && mute))
      edges.emplace_back(node, self);
    if (transfer.book().waits_for_ack_of(node)) edges.emplace_back(self, node);
  }
  return edges;
}

void Transfers::keep_alive(Transfer& transfer, Time now) {
  Frame ping;
  ping.op = transfer.op();
  for (const std::uint32_t node : transfer.book().partners())
    connections_.keep_alive(transfer.name(node), ping, now);
}

Transfers::Edges Transfers::edges_with(Transfer& transfer, std::uint32_t node) const {
  const std::uint32_t self = transfer.layout().self;
  Edges edges;
  if (transfer.book().lacks_from(node)) edges.emplace_back(node, self);
  if (transfer.book().owes(node)) edges.emplace_back(self, node);
  return edges;
}

// ---- ending ----

// Who does not answer may be why the op is given up: named, so that the next attempt avoids it.
void Transfers::abort(const OpId& op) {
  const auto at = running_.find(op);
  if (at == running_.end()) return;
  Transfer& transfer = *at->second;
  const Time now = Clock::now();
  Edges edges;
  std::string who;
  for (const std::uint32_t node : transfer.book().partners()) {
    const Time heard = connections_.last_received(transfer.name(node));
    if (now - std::max({heard, transfer.started_at, awake_since_}) <= kSilent) continue;
    for (const auto& edge : edges_with(transfer, node)) edges.push_back(edge);
    who += (who.empty() ? "; silent: " : ", ") + to_string(transfer.name(node));
  }
  end(transfer, false, "aborted" + who, std::move(edges));
}

void Transfers::abort_all(const std::string& reason) {
  while (!running_.empty()) end(*running_.begin()->second, false, reason, {});
}

// Whoever owes us what we hold already must hear of it before we go.
bool Transfers::all_told(Transfer& transfer) {
  for (std::uint32_t node = 0; node < transfer.plan().nodes.size(); ++node) {
    if (!transfer.book().held_from(node).empty() && !transfer.with(node).told) return false;
  }
  return true;
}

void Transfers::end_if_done(Transfer& transfer) {
  if (transfer.book().done() && all_told(transfer))
    end(transfer, true, "all chunks were finished and received", {});
}

void Transfers::end(Transfer& transfer, bool ok, std::string reason, Edges broken) {
  const OpId op = transfer.op();
  transfer.cancelled = true;
  transfer.report.ok = ok;
  transfer.report.reason = std::move(reason);
  transfer.report.broken = std::move(broken);
  transfer.report.wire_s = Seconds(Clock::now() - transfer.started_at).count();
  transfer.report.links = transfer.rates.report(
      transfer.layout().self, Clock::now(),
      [&](std::uint32_t node) -> Rates::Way {
        const NodeName& name = transfer.name(node);
        return {connections_.round_trip(name), connections_.loss(name)};
      });
  std::vector<NodeName> names;
  for (const Node& node : transfer.plan().nodes) {
    names.push_back(node.name);
    connections_.for_each_link(node.name, [&](Link& link) { link.release(op); });
  }
  connections_.op_ended(names);
  if (ok) {
    ended_well_[op] = transfer.layout().digest;
    if (ended_well_.size() > kRememberedEnds) ended_well_.erase(ended_well_.begin());
  }
  auto entry = running_.extract(op);
  ending_.insert(std::move(entry));
  if (transfer.sums_under_way == 0) give_report(op);
}

void Transfers::give_report(const OpId& op) {
  const auto at = ending_.find(op);
  at->second->leave_to_next_attempt();
  Report report = std::move(at->second->report);
  ending_.erase(at);
  registry_.finish(op, std::move(report));
}

}  // namespace atoll_core::engine
