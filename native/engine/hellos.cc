// Hellos under way: everything about a connection until it is a link.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "engine/connections.h"

namespace atoll_core::engine {

void Connections::accept_all() {
  while (true) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      accept_error_.clear();
      make_room_for_stranger();
      std::string from = host_text(remote_address(fd.get()));
      add_pending(std::move(fd), Role::kAcceptor, {}, from, false);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      accepting_ = false;
      accept_error_ = system_error("accepting a connection", errno).text;
      loop_.rewatch(listener_.get(), kListener, 0);
      return;
    } else {
      return;  // nobody is waiting any more
    }
  }
}

// Of the source that has most of them the oldest goes: one that opens many keeps nobody else out.
void Connections::make_room_for_stranger() {
  std::map<std::string_view, std::size_t> of_source;
  std::size_t strangers = 0;
  for (const auto& [token, pending] : pending_) {
    if (pending.dialled) continue;
    ++strangers;
    ++of_source[pending.where];
  }
  if (strangers < kMaxPendingHellos) return;
  const auto most = std::ranges::max_element(
      of_source, {}, [](const auto& entry) { return entry.second; });
  const auto oldest = std::ranges::find_if(pending_, [&](const auto& entry) {
    return !entry.second.dialled && entry.second.where == most->first;
  });
  drop_pending(oldest->first, broken("too many hellos at once"));
}

void Connections::add_pending(Fd fd, Role role, const NodeName& target, const std::string& where,
                              bool raced) {
  const Token token = next_token_++;
  const bool dials = role == Role::kDialer;
  Nonce nonce;
  Status status = random_bytes(nonce.data(), nonce.size());
  if (status.ok() && !dials) status = tune(fd.get(), options_.socket);
  if (status.ok()) status = loop_.watch(fd.get(), token, dials ? EPOLLOUT : EPOLLIN);
  Pending pending;
  pending.hello = std::make_unique<Hello>(role, credentials_, target, nonce);
  pending.stream = tls_ ? tls_->open(std::move(fd), dials) : plain_stream(std::move(fd));
  pending.connecting = pending.dialled = dials;
  pending.raced = raced;
  pending.target = target;
  pending.where = where;
  pending.expires_at = Clock::now() + options_.connect_timeout;
  pending_.emplace(token, std::move(pending));
  if (!status.ok()) drop_pending(token, status);
}

void Connections::advance(Token token, Pending& pending, std::uint32_t events) {
  if (pending.connecting) {
    if (const Status s = connect_result(pending.stream->fd()); !s.ok()) {
      drop_pending(token, s);
      return;
    }
    if ((events & EPOLLOUT) == 0) return;
    pending.connecting = false;
  }
  if (const Status s = go_on(pending); !s.ok()) {
    drop_pending(token, s);
  } else if (pending.hello->done()) {
    adopt(token);
  } else {
    const std::uint32_t room = pending.stream->has_unsent() ? EPOLLOUT : 0u;
    loop_.rewatch(pending.stream->fd(), token, EPOLLIN | room);
  }
}

Status Connections::go_on(Pending& pending) {
  if (Status s = pending.stream->flush(); !s.ok()) return s;
  if (!pending.shaken) {
    if (Status s = pending.stream->handshake(&pending.shaken); !s.ok()) return s;
    if (!pending.shaken) return success();
    if (Status s = say(pending, pending.hello->opening()); !s.ok()) return s;
  }
  return hear(pending);
}

Status Connections::hear(Pending& pending) {
  while (const std::size_t wants = pending.hello->wants()) {
    const std::size_t have = pending.heard.size();
    pending.heard.resize(wants);
    const iovec rest{pending.heard.data() + have, wants - have};
    Stream::Moved moved;
    const Status status = pending.stream->read({&rest, 1}, &moved);
    pending.heard.resize(have + moved.bytes);
    if (!status.ok()) return status;
    if (pending.heard.size() < wants) {
      if (!moved.more) return success();
      continue;
    }
    std::vector<std::uint8_t> answer;
    if (Status s = pending.hello->take(pending.heard, &answer); !s.ok()) return s;
    if (pending.hello->done() && !pending.stream->speaks_for(pending.hello->remote().peer))
      return {Kind::kRefused, "its certificate is not that of " + pending.hello->remote().peer};
    if (Status s = say(pending, answer); !s.ok()) return s;
    pending.heard.clear();
  }
  return success();
}

// A hello fits any fresh socket's buffer; an end that takes less than all of it is no peer.
Status Connections::say(Pending& pending, const std::vector<std::uint8_t>& bytes) {
  if (bytes.empty()) return success();
  const iovec part{const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
  Stream::Moved moved;
  if (Status s = pending.stream->write({&part, 1}, &moved); !s.ok()) return s;
  return moved.bytes == bytes.size() ? success() : broken("the other end takes no hello");
}

void Connections::adopt(Token token) {
  Pending pending = std::move(pending_.extract(token).mapped());
  Neighbour& neighbour = neighbour_of(pending.hello->remote());
  count_bytes(*pending.stream);
  if (neighbour.instance != pending.hello->remote_instance()) {
    lose_all(neighbour, "its engine was started anew");
    neighbour.instance = pending.hello->remote_instance();
    client_->on_node_restarted(neighbour.name);
  }
  make_room(neighbour);
  ++(pending.dialled ? counters_.dialled_links : counters_.accepted_links);
  if (pending.dialled) {
    dial_came(neighbour, pending.where, pending.raced);
  } else if (std::string host = host_text(remote_address(pending.stream->fd())); !host.empty()) {
    neighbour.origin = std::move(host);  // a socket that was reset meanwhile does not know it
  }
  const auto sent_bytes = static_cast<std::size_t>(pending.stream->sent_bytes());
  const auto received_bytes = static_cast<std::size_t>(pending.stream->received_bytes());
  loop_.rewatch(pending.stream->fd(), token, EPOLLIN);
  neighbour.links.push_back(std::make_unique<Slot>(token, std::move(pending.stream), neighbour.name,
                                                   *link_client_, Clock::now()));
  Slot& slot = *neighbour.links.back();
  links_[token] = {&neighbour, &slot};
  if (slot.link.has_buffered()) buffered_.insert(token);  // frames that came with the hello
  link_came(neighbour, pending.dialled);
  keep_pace(neighbour);
  client_->on_link_up(slot.link, sent_bytes, received_bytes);
}

void Connections::drop_pending(Token token, const Status& why) {
  const Pending pending = std::move(pending_.extract(token).mapped());
  count_bytes(*pending.stream);
  loop_.unwatch(pending.stream->fd());
  if (!pending.dialled) {
    ++counters_.refused_hellos;
    return;
  }
  const bool gone = pending.connecting && why.error_number == ECONNREFUSED;
  const bool disproved = pending.hello->refused();
  const std::string text =
      disproved ? "it refused our proof (" + why.text + "); the session keys may differ" : why.text;
  dial_failed(neighbour_of(pending.target), pending.where, pending.raced, text,
              disproved || why.kind == Kind::kRefused ? Refusal::kSaidNo
              : gone                                  ? Refusal::kClosedPort
                                                      : Refusal::kNot);
}

// A hello's bytes belong to no op yet.
void Connections::count_bytes(const Stream& stream) {
  counters_.sent_bytes += stream.sent_bytes();
  counters_.received_bytes += stream.received_bytes();
}

}  // namespace atoll_core::engine
