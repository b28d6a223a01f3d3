#include "engine/connections.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace atoll_core::engine {
namespace {

constexpr std::size_t kOwnFds = 3;  // epoll, eventfd, listener

}  // namespace

Connections::Connections(Loop& loop, Pool& pool, Counters& counters, Credentials credentials,
                         Seconds connect_timeout)
    : loop_(loop),
      pool_(pool),
      counters_(counters),
      credentials_(std::move(credentials)),
      connect_timeout_(to_duration(connect_timeout)) {}

Status Connections::listen(const std::string& host, std::uint16_t port, std::uint16_t* bound_port) {
  if (Status s = listen_on(host, port, &listener_, bound_port); !s.ok()) return s;
  count_fds();
  return loop_.watch(listener_.get(), kListener, EPOLLIN);
}

void Connections::serve(ConnectionsClient& client, LinkClient& link_client) {
  client_ = &client;
  link_client_ = &link_client;
}

// ---- events ----

bool Connections::on_event(Token token, std::uint32_t events) {
  if (token == kListener) {
    accept_all();
  } else if (const auto pending = pending_.find(token); pending != pending_.end()) {
    advance(token, pending->second, events);
  } else if (const auto link = links_.find(token); link != links_.end()) {
    on_link_event(*link->second, events);
  } else {
    return false;
  }
  return true;
}

void Connections::on_tick(Time now) {
  if (!accepting_) {
    accepting_ = true;
    loop_.rewatch(listener_.get(), kListener, EPOLLIN);
  }
  std::vector<Token> expired;
  for (const auto& [token, pending] : pending_) {
    if (pending.expires_at <= now) expired.push_back(token);
  }
  for (const Token token : expired) drop_pending(token, "no answer in time");
}

bool Connections::has_timed_work() const {
  const auto dialling = [](const auto& entry) { return entry.second.dialling; };
  return !accepting_ || !pending_.empty() || std::ranges::any_of(neighbours_, dialling);
}

void Connections::flush() {
  const Time now = Clock::now();
  for (auto& [name, neighbour] : neighbours_) {
    if (neighbour.dialling && neighbour.retry_at <= now) try_dial(neighbour);
    if (neighbour.link && !neighbour.watching_out) flush_link(neighbour, now);
  }
  count_fds();
}

bool Connections::all_sent() const {
  return std::ranges::none_of(neighbours_, [](const auto& entry) {
    return entry.second.link && entry.second.link->wants_to_send();
  });
}

void Connections::close() {
  pending_.clear();
  links_.clear();
  neighbours_.clear();
  listener_.reset();
  counters_.open_fds = counters_.connections = 0;
}

void Connections::count_fds() {
  counters_.open_fds = kOwnFds + pending_.size() + links_.size();
  counters_.connections = links_.size();
}

// ---- links ----

Link* Connections::link(const NodeName& node) {
  const auto at = neighbours_.find(node);
  return at == neighbours_.end() ? nullptr : at->second.link.get();
}

void Connections::on_link_event(Neighbour& neighbour, std::uint32_t events) {
  const Time now = Clock::now();
  if ((events & EPOLLOUT) != 0) {
    flush_link(neighbour, now);
    if (!neighbour.link) return;
  }
  if ((events & ~EPOLLOUT) == 0) return;
  if (const Status s = neighbour.link->pump_in(now); !s.ok()) lose_link(neighbour, s.text);
}

void Connections::flush_link(Neighbour& neighbour, Time now) {
  if (const Status s = neighbour.link->pump_out(now); !s.ok()) {
    lose_link(neighbour, s.text);
    return;
  }
  const bool wants = neighbour.link->wants_to_send();
  if (wants == neighbour.watching_out) return;
  neighbour.watching_out = wants;
  loop_.rewatch(neighbour.link->fd(), neighbour.token, wants ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Connections::close_link(Neighbour& neighbour) {
  links_.erase(neighbour.token);
  loop_.unwatch(neighbour.link->fd());
  neighbour.link.reset();
}

void Connections::lose_link(Neighbour& neighbour, const std::string& reason) {
  close_link(neighbour);
  client_->on_link_lost(neighbour.name, reason);
}

Connections::Neighbour& Connections::neighbour_of(const NodeName& node) {
  Neighbour& neighbour = neighbours_[node];
  neighbour.name = node;
  return neighbour;
}

}  // namespace atoll_core::engine
