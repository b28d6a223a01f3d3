#include "engine/connections.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace atoll_core::engine {
namespace {

constexpr std::size_t kOwnFds = 3;               // epoll, eventfd, listener
constexpr std::int64_t kBudgetBytes = 4u << 20;  // per pump: the other links must not wait long
constexpr std::int64_t kShareBytes = 64u << 10;  // the same, where the rate is limited
constexpr std::size_t kSpareLinks = 2;           // both ends may have dialled at once
constexpr Clock::duration kPingAfter = std::chrono::milliseconds(250);

}  // namespace

Connections::Connections(Loop& loop, LookUps& look_ups, Counters& counters, Credentials credentials,
                         ConnectionsOptions options, std::unique_ptr<Tls> tls)
    : loop_(loop),
      look_ups_(look_ups),
      counters_(counters),
      credentials_(std::move(credentials)),
      options_(std::move(options)),
      tls_(std::move(tls)),
      up_(options_.max_up),
      down_(options_.max_down) {}

Status Connections::listen(const std::string& host, std::uint16_t port, std::uint16_t* bound_port) {
  if (Status s = listen_on(host, port, &listener_, bound_port); !s.ok()) return s;
  // Receive buffers must be chosen before a connection comes: its window scale follows from them.
  if (Status s = tune(listener_.get(), options_.socket); !s.ok()) return s;
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
  } else if (links_.contains(token)) {
    on_link_event(token, events);
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
  resume(now);
  std::vector<Token> expired;
  for (const auto& [token, pending] : pending_) {
    if (pending.expires_at <= now) expired.push_back(token);
  }
  for (const Token token : expired) drop_pending(token, broken("no answer in time"));
  for (auto& [name, neighbour] : neighbours_) {
    watch_race(neighbour, now);
    watch_patience(neighbour, now);
  }
  watch_paces(now);
}

bool Connections::has_timed_work() const {
  const auto waits = [](const auto& entry) {
    const Dialling& dialling = entry.second.dialling;
    return entry.second.lost_at != Time::max() || dialling.next_try != Time::max() ||
           dialling.next_start != Time::max();
  };
  return !accepting_ || !pending_.empty() || std::ranges::any_of(neighbours_, waits);
}

void Connections::flush() {
  const Time now = Clock::now();
  read_buffered(now);
  const auto serve = [&](auto begin, auto end) {
    for (auto at = begin; at != end; ++at) {
      if (at->second.dialling.next_try <= now) dial(at->second);
      flush_node(at->second, now);
    }
  };
  const auto first = neighbours_.upper_bound(last_served_);
  serve(first, neighbours_.end());
  serve(neighbours_.begin(), first);
  count_fds();
}

bool Connections::all_sent() const {
  return std::ranges::none_of(
      links_, [](const auto& entry) { return entry.second.second->link.wants_to_send(); });
}

void Connections::close() {
  for (auto& [token, entry] : links_) entry.second->link.say_goodbye();
  buffered_.clear();
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
  if (at == neighbours_.end() || at->second.links.empty()) return nullptr;
  const auto& links = at->second.links;
  const auto idle =
      std::ranges::find_if(links, [](const auto& slot) { return !slot->link.wants_to_send(); });
  return &(idle == links.end() ? links.front() : *idle)->link;
}

Time Connections::last_received(const NodeName& node) const {
  Time last = Time::min();
  const auto at = neighbours_.find(node);
  if (at == neighbours_.end()) return last;
  for (const auto& slot : at->second.links) last = std::max(last, slot->link.last_received());
  return last;
}

void Connections::keep_alive(const NodeName& node, const Frame& ping, Time now) {
  Neighbour& neighbour = neighbour_of(node);
  Link* idle = link(node);
  // If all are busy, what they send shows that we live.
  if (idle == nullptr || idle->wants_to_send() || now - neighbour.pinged_at < kPingAfter) return;
  Time sent = Time::min();
  for (const auto& slot : neighbour.links) sent = std::max(sent, slot->link.last_sent());
  if (now - sent < kPingAfter && now - last_received(node) < kPingAfter) return;
  neighbour.pinged_at = now;
  idle->queue(ping);
}

void Connections::drop(const NodeName& node) {
  Neighbour& neighbour = neighbour_of(node);
  lose_all(neighbour, "it was silent");
}

unsigned Connections::wanted(const NodeName& node) const {
  const auto at = neighbours_.find(node);
  return at == neighbours_.end() ? 0 : at->second.wanted;
}

void Connections::on_link_event(Token token, std::uint32_t events) {
  const auto [neighbour, slot] = links_.at(token);
  const Time now = Clock::now();
  if ((events & EPOLLOUT) != 0 && !flush_link(*neighbour, *slot, now)) return;
  if ((events & ~EPOLLOUT) == 0) return;
  read_link(*neighbour, *slot, (events & (EPOLLHUP | EPOLLERR)) != 0, now);
}

// A link that fails is read whatever the rate allows: epoll would tell of it for ever.
void Connections::read_link(Neighbour& neighbour, Slot& slot, bool failing, Time now) {
  const std::int64_t allowed = down_.allows(down_.limited() ? kShareBytes : kBudgetBytes, now);
  if (allowed == 0 && !failing) {
    slot.paused = true;
    watch(slot);
    return;
  }
  const std::int64_t budget_bytes = std::max<std::int64_t>(allowed, kFrameBytes);
  std::int64_t left = budget_bytes;
  const Status status = slot.link.pump_in(now, left);
  down_.take(budget_bytes - left);
  if (!status.ok()) {
    lose_link(neighbour, slot, status.text);
  } else if (slot.link.has_buffered()) {
    buffered_.insert(slot.token);
  }
}

void Connections::read_buffered(Time now) {
  for (const Token token : std::exchange(buffered_, {})) {
    const auto at = links_.find(token);
    if (at == links_.end() || at->second.second->paused) continue;
    read_link(*at->second.first, *at->second.second, false, now);
  }
}

void Connections::resume(Time now) {
  if (!down_.limited() || down_.allows(1, now) == 0) return;
  for (const auto& [token, entry] : links_) {
    Slot& slot = *entry.second;
    if (!slot.paused) continue;
    slot.paused = false;
    watch(slot);
    if (slot.link.has_buffered()) buffered_.insert(token);
  }
}

void Connections::watch(const Slot& slot) {
  const std::uint32_t in = slot.paused ? 0u : EPOLLIN;
  const std::uint32_t out = slot.watching_out ? EPOLLOUT : 0u;
  loop_.rewatch(slot.link.fd(), slot.token, in | out);
}

// Links pull: whichever has room takes the next payload. Once one finds nothing to send, the other
// idle ones of the node need not ask.
void Connections::flush_node(Neighbour& neighbour, Time now) {
  bool nothing_left = false;
  for (std::size_t i = 0; i < neighbour.links.size();) {
    Slot& slot = *neighbour.links[i];
    const bool due = !slot.watching_out && (!nothing_left || slot.link.wants_to_send());
    if (due && !flush_link(neighbour, slot, now)) continue;  // it is gone; the next has moved up
    nothing_left |= due && !slot.link.wants_to_send();
    ++i;
  }
}

// False if the link broke, and is gone.
bool Connections::flush_link(Neighbour& neighbour, Slot& slot, Time now) {
  const std::int64_t allowed = up_.allows(up_.limited() ? kShareBytes : kBudgetBytes, now);
  std::int64_t left = allowed;
  if (const Status s = slot.link.pump_out(now, left); !s.ok()) {
    lose_link(neighbour, slot, s.text);
    return false;
  }
  up_.take(allowed - left);
  const bool spent = up_.allows(1, now) == 0;
  if (spent && allowed > 0) last_served_ = neighbour.name;
  // With its budget spent it may have more than it knows of. Without a rate, ticks will ask again.
  const bool wants = !spent && (slot.link.wants_to_send() || left <= 0);
  if (wants != slot.watching_out) {
    slot.watching_out = wants;
    watch(slot);
  }
  return true;
}

void Connections::remove(Neighbour& neighbour, const Slot& slot, const std::string& reason) {
  ++counters_.broken_links;
  neighbour.broke = reason;
  auto& links = neighbour.links;
  const auto at = std::ranges::find_if(links, [&](const auto& one) { return one.get() == &slot; });
  const std::unique_ptr<Slot> owned = std::move(*at);
  links.erase(at);
  links_.erase(owned->token);
  buffered_.erase(owned->token);
  loop_.unwatch(owned->link.fd());
  keep_pace(neighbour);
  client_->on_link_lost(owned->link, links.empty() ? nullptr : &links.front()->link);
}

void Connections::lose_link(Neighbour& neighbour, const Slot& slot, const std::string& reason) {
  const Clock::duration lived = Clock::now() - slot.link.up_since();
  remove(neighbour, slot, reason);
  link_broke(neighbour, lived);
}

void Connections::lose_all(Neighbour& neighbour, const std::string& reason) {
  while (!neighbour.links.empty()) remove(neighbour, *neighbour.links.back(), reason);
}

// The other end dialled more than it may: then some of the older ones are dead over there, and we
// have not noticed. The quietest is the likeliest.
void Connections::make_room(Neighbour& neighbour) {
  const std::size_t most =
      (neighbour.wanted == 0 ? kMaxConnections : neighbour.wanted) + kSpareLinks;
  if (neighbour.links.size() < most) return;
  const auto quietest = std::ranges::min_element(
      neighbour.links, {}, [](const auto& slot) { return slot->link.last_received(); });
  remove(neighbour, **quietest, "newer ones took its place");
}

Connections::Neighbour& Connections::neighbour_of(const NodeName& node) {
  Neighbour& neighbour = neighbours_[node];
  neighbour.name = node;
  return neighbour;
}

}  // namespace atoll_core::engine
