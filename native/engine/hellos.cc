// Hellos under way and dialling: everything about a connection until it is a link.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "engine/connections.h"

namespace atoll_core::engine {
namespace {

constexpr Clock::duration kFirstBackoff = std::chrono::milliseconds(50);
constexpr Clock::duration kLongestBackoff = std::chrono::seconds(1);

// A closed port means that the process is gone: waiting would only delay the others.
bool final_error(const Status& status) { return status.error_number == ECONNREFUSED; }

}  // namespace

// ---- hellos ----

void Connections::accept_all() {
  while (true) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      evict_oldest_stranger();
      add_pending(std::move(fd), Role::kAcceptor, {});
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      accepting_ = false;
      loop_.rewatch(listener_.get(), kListener, 0);
      return;
    } else {
      return;  // nobody is waiting any more
    }
  }
}

void Connections::evict_oldest_stranger() {
  const auto stranger = [](const auto& entry) { return !entry.second.dialled; };
  const auto count = static_cast<std::size_t>(std::ranges::count_if(pending_, stranger));
  if (count < kMaxPendingHellos) return;
  drop_pending(std::ranges::find_if(pending_, stranger)->first, "too many hellos at once");
}

void Connections::add_pending(Fd fd, Role role, const NodeName& target) {
  const Token token = next_token_++;
  const bool dials = role == Role::kDialer;
  Nonce nonce;
  Pending pending;
  Status status = random_bytes(nonce.data(), nonce.size());
  if (status.ok()) status = tune(fd.get(), connect_timeout_);
  if (status.ok()) status = loop_.watch(fd.get(), token, dials ? EPOLLOUT : EPOLLIN);
  pending.hello = std::make_unique<Hello>(role, credentials_, target, nonce);
  pending.fd = std::move(fd);
  pending.connecting = pending.dialled = dials;
  pending.target = target;
  pending.expires_at = Clock::now() + connect_timeout_;
  pending_.emplace(token, std::move(pending));
  if (!status.ok()) drop_pending(token, status.text);
}

void Connections::advance(Token token, Pending& pending, std::uint32_t events) {
  if (pending.connecting) {
    if (const Status s = connect_result(pending.fd.get()); !s.ok()) {
      Neighbour& neighbour = neighbour_of(pending.target);
      loop_.unwatch(pending.fd.get());
      pending_.erase(token);
      dial_failed(neighbour, s.text, final_error(s));
      return;
    }
    if ((events & EPOLLOUT) == 0) return;
    pending.connecting = false;
    loop_.rewatch(pending.fd.get(), token, EPOLLIN);
    if (const Status s = say(pending, pending.hello->opening()); !s.ok())
      drop_pending(token, s.text);
    return;
  }
  if (const Status s = hear(pending); !s.ok()) {
    drop_pending(token, s.text);
  } else if (pending.hello->done()) {
    adopt(token);
  }
}

Status Connections::hear(Pending& pending) {
  while (const std::size_t wants = pending.hello->wants()) {
    const std::size_t have = pending.heard.size();
    pending.heard.resize(wants);
    const ssize_t got = recv(pending.fd.get(), pending.heard.data() + have, wants - have, 0);
    pending.heard.resize(have + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return success();
    if (got < 0) return system_error("receiving", errno);
    if (got == 0) return broken("the other end hung up during the hello");
    pending.received_bytes += static_cast<std::size_t>(got);
    counters_.received_bytes += static_cast<std::size_t>(got);
    if (pending.heard.size() < wants) continue;
    std::vector<std::uint8_t> answer;
    if (Status s = pending.hello->take(pending.heard, &answer); !s.ok()) return s;
    if (Status s = say(pending, answer); !s.ok()) return s;
    pending.heard.clear();
  }
  return success();
}

// A hello fits any fresh socket's buffer; an end that takes less than all of it is no peer.
Status Connections::say(Pending& pending, const std::vector<std::uint8_t>& bytes) {
  if (bytes.empty()) return success();
  const ssize_t sent =
      send(pending.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return system_error("sending", errno);
  pending.sent_bytes += static_cast<std::size_t>(sent);
  counters_.sent_bytes += static_cast<std::size_t>(sent);
  if (static_cast<std::size_t>(sent) < bytes.size()) return broken("the other end takes no hello");
  return success();
}

void Connections::adopt(Token token) {
  Pending pending = std::move(pending_.extract(token).mapped());
  Neighbour& neighbour = neighbour_of(pending.hello->remote());
  if (neighbour.link) lose_link(neighbour, "it connected anew");
  neighbour.dialling = false;
  neighbour.token = token;
  neighbour.watching_out = false;
  links_[token] = &neighbour;
  neighbour.link =
      std::make_unique<Link>(std::move(pending.fd), neighbour.name, *link_client_, Clock::now());
  client_->on_link_up(*neighbour.link, pending.sent_bytes, pending.received_bytes);
}

void Connections::drop_pending(Token token, const std::string& reason) {
  const Pending pending = std::move(pending_.extract(token).mapped());
  loop_.unwatch(pending.fd.get());
  if (pending.dialled) {
    const bool refused = pending.hello->refused();
    dial_failed(
        neighbour_of(pending.target),
        refused ? "it refused our proof (" + reason + "); the session keys may differ" : reason,
        refused);
  } else {
    ++counters_.refused_hellos;
  }
}

// ---- dialling ----

void Connections::want(const NodeName& node, const std::string& host, std::uint16_t port) {
  Neighbour& neighbour = neighbour_of(node);
  const bool moved = neighbour.host != host || neighbour.port != port;
  neighbour.host = host;
  neighbour.port = port;
  const bool we_dial = credentials_.self < node;
  if (!we_dial || (neighbour.link && !moved)) return;
  neighbour.give_up_at = Clock::now() + connect_timeout_;
  if (neighbour.dialling) return;
  if (neighbour.link) lose_link(neighbour, "it moved to another address");
  neighbour.dialling = true;
  neighbour.backoff = kFirstBackoff;
  neighbour.retry_at = Time::min();
  neighbour.addresses.clear();
  neighbour.next_address = 0;
}

void Connections::try_dial(Neighbour& neighbour) {
  neighbour.retry_at = Time::max();
  if (neighbour.addresses.empty() &&
      !resolve(neighbour.host, neighbour.port, true, &neighbour.addresses).ok()) {
    pool_.submit([this, node = neighbour.name, host = neighbour.host, port = neighbour.port] {
      std::vector<Address> addresses;
      Status status = resolve(host, port, false, &addresses);
      loop_.post([this, node, status, addresses] { resolved(node, status, addresses); });
    });
    return;
  }
  Fd fd;
  const Address& address = neighbour.addresses[neighbour.next_address];
  if (const Status s = start_connect(address, &fd); !s.ok()) {
    dial_failed(neighbour, s.text, final_error(s));
  } else {
    add_pending(std::move(fd), Role::kDialer, neighbour.name);
  }
}

void Connections::resolved(const NodeName& node, const Status& status,
                           std::vector<Address> addresses) {
  Neighbour& neighbour = neighbour_of(node);
  if (!neighbour.dialling) return;
  neighbour.addresses = std::move(addresses);
  if (status.ok()) {
    neighbour.retry_at = Time::min();
  } else {
    dial_failed(neighbour, status.text, false);
  }
}

void Connections::dial_failed(Neighbour& neighbour, const std::string& reason, bool final) {
  if (!neighbour.dialling) return;  // it called us meanwhile
  const Time now = Clock::now();
  if (neighbour.next_address + 1 < neighbour.addresses.size()) {
    ++neighbour.next_address;
    neighbour.retry_at = now;
    return;
  }
  neighbour.next_address = 0;
  if (!final && now + neighbour.backoff < neighbour.give_up_at) {
    neighbour.retry_at = now + neighbour.backoff;
    neighbour.backoff = std::min(2 * neighbour.backoff, kLongestBackoff);
    return;
  }
  neighbour.dialling = false;
  client_->on_link_lost(neighbour.name, "could not connect to " + neighbour.host + " port " +
                                            std::to_string(neighbour.port) + ": " + reason);
}

}  // namespace atoll_core::engine
