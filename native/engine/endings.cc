// How ops end: by success, abort, or time.
#include <algorithm>
#include <cstdio>

#include "engine/transfers.h"

namespace atoll_core::engine {
namespace {

constexpr Clock::duration kPingAfter = std::chrono::milliseconds(250);
constexpr Clock::duration kSilent = std::chrono::seconds(1);  // four pings

std::string seconds(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", Seconds(duration).count());
  return text;
}

}  // namespace

// ---- time ----

void Transfers::on_tick(Time now) {
  std::vector<Transfer*> all;
  for (auto& [op, transfer] : running_) all.push_back(transfer.get());
  for (Transfer* transfer : all) {
    if (transfer->expires_at <= now) {
      expire(*transfer, now);
    } else if (check_connected(*transfer, now)) {
      keep_alive(*transfer, now);
    }
  }
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
    const Link* link = connections_.link(transfer.name(node));
    const bool mute = link == nullptr || now - link->last_received() > silent;
    const bool lacks = transfer.book().lacks_from(node);
    if (transfer.book().lacks_contributions_from(node) || (lacks && mute))
      edges.emplace_back(node, self);
    if (transfer.book().waits_for_ack_of(node)) edges.emplace_back(self, node);
  }
  return edges;
}

bool Transfers::check_connected(Transfer& transfer, Time now) {
  if (now - transfer.started_at < connect_timeout_) return true;
  const std::uint32_t self = transfer.layout().self;
  for (const std::uint32_t node : transfer.book().partners()) {
    const bool they_dial = transfer.name(node) < transfer.name(self);
    if (!they_dial || connections_.link(transfer.name(node)) != nullptr) continue;
    end(transfer, false,
        to_string(transfer.name(node)) + " did not connect within " + seconds(connect_timeout_),
        {{node, self}, {self, node}});
    return false;
  }
  return true;
}

void Transfers::keep_alive(Transfer& transfer, Time now) {
  for (const std::uint32_t node : transfer.book().partners()) {
    Link* link = connections_.link(transfer.name(node));
    if (link == nullptr || link->wants_to_send() || now - link->last_sent() < kPingAfter) continue;
    Frame ping;
    ping.op = transfer.op();
    link->queue(ping);
  }
}

// ---- ending ----

void Transfers::abort(const OpId& op) {
  if (const auto at = running_.find(op); at != running_.end())
    end(*at->second, false, "aborted", {});
}

void Transfers::abort_all(const std::string& reason) {
  while (!running_.empty()) end(*running_.begin()->second, false, reason, {});
}

void Transfers::end_if_done(Transfer& transfer) {
  if (transfer.book().done()) end(transfer, true, "all chunks were finished and received", {});
}

void Transfers::end(Transfer& transfer, bool ok, std::string reason, Edges broken) {
  const OpId op = transfer.op();
  transfer.cancelled = true;
  transfer.report.ok = ok;
  transfer.report.reason = std::move(reason);
  transfer.report.broken = std::move(broken);
  transfer.report.wire_s = Seconds(Clock::now() - transfer.started_at).count();
  for (const Node& node : transfer.plan().nodes) {
    if (Link* link = connections_.link(node.name)) link->release(op);
  }
  auto entry = running_.extract(op);
  ending_.insert(std::move(entry));
  if (transfer.sums_under_way == 0) give_report(op);
}

void Transfers::give_report(const OpId& op) {
  const auto at = ending_.find(op);
  Report report = std::move(at->second->report);
  if (Slab slab = at->second->take_slab(); slab.size > spare_.size) spare_ = std::move(slab);
  ending_.erase(at);
  registry_.finish(op, std::move(report));
}

}  // namespace atoll_core::engine
