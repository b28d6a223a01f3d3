#include "engine/reaching.h"

#include <utility>

namespace atoll_core::engine {

std::vector<ReachResult> Reaching::try_all(const std::vector<Node>& nodes, Seconds deadline) {
  const auto call = std::make_shared<Call>();
  call->results.resize(nodes.size());
  call->open = nodes.size();
  const Time expires_at = Clock::now() + to_duration(deadline);
  loop_.post([this, nodes, expires_at, call] { begin(nodes, expires_at, call); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return call->open == 0 || closed_; });
  for (ReachResult& result : call->results) {
    if (closed_ && result.where.empty() && result.failure.empty())
      result.failure = "the engine was closed";
  }
  return call->results;
}

void Reaching::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Reaching::begin(const std::vector<Node>& nodes, Time expires_at,
                     const std::shared_ptr<Call>& call) {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = nodes[i];
    if (needs(node.name)) end(node.name, {"", "another trial took its place"});
    trials_[node.name] = {call, i, expires_at};
    connections_.reach(node.name, node.host, node.port);
  }
}

void Reaching::on_tick(Time now) {
  std::vector<NodeName> late;
  for (const auto& [node, trial] : trials_) {
    if (trial.expires_at <= now) late.push_back(node);
  }
  for (const NodeName& node : late) end(node, {"", connections_.stop_reaching(node)});
}

void Reaching::end(const NodeName& node, ReachResult result) {
  const auto trial = trials_.extract(node);
  if (trial.empty()) return;
  if (result.where.empty() && result.failure.empty()) result.failure = "no answer";
  std::lock_guard lock(mutex_);
  Call& call = *trial.mapped().call;
  call.results[trial.mapped().index] = std::move(result);
  if (--call.open == 0) changed_.notify_all();
}

}  // namespace atoll_core::engine
