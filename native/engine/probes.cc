#include "engine/probes.h"

#include <algorithm>
#include <array>
#include <utility>

namespace atoll_core::engine {
namespace {

constexpr std::uint32_t kPayloadBytes = 32u << 10;
constexpr std::uint64_t kMostFrames = 1u << 16;
// On the way at first; every answer allows one more, so it doubles with every round trip.
constexpr std::uint32_t kFirstFrames = 4;
const std::array<std::uint8_t, kPayloadBytes> kPayload{};

}  // namespace

std::vector<ProbeResult> Probes::measure(const std::vector<Node>& nodes, unsigned connections,
                                         std::uint64_t bytes, Seconds deadline) {
  const auto call = std::make_shared<Call>();
  call->results.resize(nodes.size());
  call->open = nodes.size();
  const Time expires_at = Clock::now() + to_duration(deadline);
  const std::uint64_t frames = std::clamp<std::uint64_t>(bytes / kPayloadBytes, 2, kMostFrames);
  loop_.post([this, nodes, connections, frames, expires_at, call] {
    begin(nodes, connections, static_cast<std::uint32_t>(frames), expires_at, call);
  });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return call->open == 0 || closed_; });
  for (ProbeResult& result : call->results) {
    if (closed_ && result.bytes_per_s == 0 && result.failure.empty())
      result.failure = "the engine was closed";
  }
  return call->results;
}

void Probes::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Probes::begin(const std::vector<Node>& nodes, unsigned connections, std::uint32_t frames,
                   Time expires_at, const std::shared_ptr<Call>& call) {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = nodes[i];
    if (needs(node.name)) end(node.name, {0, 0, "another probe took its place"});
    running_[node.name] = {call, i, next_id_++, frames, 0, expires_at, {}};
    connections_.want(node.name, node.host, node.port,
                      std::max(connections, connections_.wanted(node.name)));
  }
}

std::optional<Outgoing> Probes::next(const Link& link) {
  const auto at = running_.find(link.remote());
  if (at == running_.end()) return std::nullopt;
  Probe& probe = at->second;
  const std::size_t allowed = kFirstFrames + 2 * probe.answers.size();
  if (probe.sent == std::min<std::size_t>(probe.frames, allowed)) return std::nullopt;
  Outgoing out;
  out.frame.type = FrameType::kProbe;
  out.frame.plan_digest = probe.id;
  out.frame.chunk = probe.sent++;
  out.frame.length = kPayloadBytes;
  out.payload = kPayload.data();
  return out;
}

void Probes::answered(const Link& link, const Frame& frame) {
  const auto at = running_.find(link.remote());
  if (at == running_.end() || at->second.id != frame.plan_digest) return;
  Probe& probe = at->second;
  if (probe.answers.size() == probe.sent) return;
  probe.answers.push_back(Clock::now());
  if (probe.answers.size() == probe.frames) end(link.remote(), rate_of(link.remote(), probe));
}

void Probes::lost(const NodeName& node, const std::string& reason) {
  if (needs(node)) end(node, {0, 0, reason});
}

void Probes::op_began() {
  while (!running_.empty())
    end(running_.begin()->first, {0, 0, "an op began before it was measured"});
}

void Probes::on_tick(Time now) {
  std::vector<NodeName> late;
  for (const auto& [node, probe] : running_) {
    if (probe.expires_at <= now) late.push_back(node);
  }
  for (const NodeName& node : late) end(node, rate_of(node, running_.at(node)));
}

// Of the second half of what was answered, however much that is: before, TCP was warming up.
ProbeResult Probes::rate_of(const NodeName& node, const Probe& probe) const {
  const std::size_t count = probe.answers.size();
  if (count < 2) return {0, 0, "too few answers by the deadline"};
  const std::size_t half = count / 2;
  const double bytes = static_cast<double>(count - half) * kPayloadBytes;
  const double seconds = Seconds(probe.answers[count - 1] - probe.answers[half - 1]).count();
  return {bytes / std::max(seconds, 1e-6), connections_.round_trip(node).count(), ""};
}

void Probes::end(const NodeName& node, ProbeResult result) {
  const auto probe = running_.extract(node);
  std::lock_guard lock(mutex_);
  Call& call = *probe.mapped().call;
  call.results[probe.mapped().index] = std::move(result);
  if (--call.open == 0) changed_.notify_all();
}

}  // namespace atoll_core::engine
