#include "engine/registry.h"

namespace atoll_core::engine {

Status Registry::admit(const OpId& op) {
  std::lock_guard lock(mutex_);
  if (closed_) return bad_argument("the engine is closed");
  if (aborted_early_.contains(op))
    return bad_argument("op " + to_string(op) + " was aborted before it began");
  if (used_locked(op)) {
    return bad_argument("op " + to_string(op) +
                        " was used before; every attempt needs an id of its own");
  }
  remember(op);
  live_[op] = std::nullopt;
  return success();
}

void Registry::finish(const OpId& op, Report report) {
  {
    std::lock_guard lock(mutex_);
    live_[op] = std::move(report);
  }
  ended_.notify_all();
}

void Registry::close(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto& [op, report] : live_) {
      if (!report) report.emplace().reason = reason;
    }
  }
  ended_.notify_all();
}

bool Registry::abort(const OpId& op) {
  std::lock_guard lock(mutex_);
  if (live_.contains(op)) return true;
  if (!used_locked(op)) {
    aborted_early_.insert(op);
    remember(op);
  }
  return false;
}

bool Registry::over(const OpId& op) const {
  std::lock_guard lock(mutex_);
  return used_locked(op) && !live_.contains(op);
}

std::optional<Report> Registry::wait(const OpId& op, Seconds timeout, bool* known) {
  const Time until = Clock::now() + to_duration(timeout);
  std::unique_lock lock(mutex_);
  auto at = live_.find(op);
  *known = at != live_.end();
  if (!*known) return std::nullopt;
  const auto over = [&] {
    at = live_.find(op);
    return at == live_.end() || at->second.has_value();
  };
  if (!ended_.wait_until(lock, until, over)) return std::nullopt;
  *known = at != live_.end();  // another waiter may have taken it
  if (!*known) return std::nullopt;
  std::optional<Report> report = std::move(at->second);
  live_.erase(at);
  return report;
}

bool Registry::used_locked(const OpId& op) const {
  return used_.contains(op) || (floor_ && op <= *floor_);
}

void Registry::remember(const OpId& op) {
  used_.insert(op);
  if (used_.size() <= kRemembered) return;
  floor_ = *used_.begin();
  used_.erase(used_.begin());
  aborted_early_.erase(*floor_);
}

}  // namespace atoll_core::engine
