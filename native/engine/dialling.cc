// Who is dialled when, and when a node is lost.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "engine/connections.h"

namespace atoll_core::engine {
namespace {

constexpr Clock::duration kNow{0};
constexpr Clock::duration kFirstBackoff = std::chrono::milliseconds(50);
constexpr unsigned kDoublings = 5;  // of it: to 1.6 s
// How long the other end, whose turn it is, has to fill up what is missing.
constexpr Clock::duration kTheirTurn = std::chrono::seconds(1);
// A link that breaks sooner counts as a failed try.
constexpr Clock::duration kSoon = std::chrono::seconds(1);
// Hellos under way with one node: acceptors keep few of them, see kMaxPendingHellos.
constexpr unsigned kDialsAtOnce = 8;

Clock::duration backoff(unsigned failures) {
  if (failures == 0) return kNow;
  return kFirstBackoff * (1u << std::min(failures - 1, kDoublings));
}

std::string seconds(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", Seconds(duration).count());
  return text;
}

}  // namespace

void Connections::want(const NodeName& node, const std::string& host, std::uint16_t port,
                       unsigned connections) {
  Neighbour& neighbour = neighbour_of(node);
  if (neighbour.host != host || neighbour.port != port) {
    neighbour.dialling.addresses.clear();
    neighbour.dialling.next_address = 0;
    if (neighbour.wanted > 0) lose_all(neighbour, "it moved to another address");
  }
  neighbour.host = host;
  neighbour.port = port;
  neighbour.wanted = connections;
  neighbour.dialling.failures = 0;
  if (missing(neighbour) > 0) schedule(neighbour, we_dial_first(node) ? kNow : kTheirTurn);
  if (!neighbour.links.empty()) return;
  neighbour.broke.clear();
  neighbour.dialling.last_error.clear();
  neighbour.lost_at = Clock::now() + options_.patience;
}

unsigned Connections::missing(const Neighbour& neighbour) const {
  const auto have = static_cast<unsigned>(neighbour.links.size()) + neighbour.dialling.under_way;
  return have < neighbour.wanted ? neighbour.wanted - have : 0;
}

void Connections::schedule(Neighbour& neighbour, Clock::duration delay) {
  neighbour.dialling.next_try = Clock::now() + delay;
}

// The first link alone: it shows whether the node is there at all.
void Connections::dial(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  dialling.next_try = Time::max();
  if (!client_->needs(neighbour.name)) return;
  const bool alone = neighbour.links.empty() || !we_dial_first(neighbour.name);
  const unsigned most = alone ? 1 : kDialsAtOnce;
  while (missing(neighbour) > 0 && dialling.under_way < most && !dialling.resolving &&
         dialling.next_try == Time::max()) {
    dial_once(neighbour);
  }
}

void Connections::dial_once(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  if (dialling.addresses.empty() &&
      !resolve(neighbour.host, neighbour.port, true, &dialling.addresses).ok()) {
    dialling.resolving = true;
    pool_.submit([this, node = neighbour.name, host = neighbour.host, port = neighbour.port] {
      std::vector<Address> addresses;
      Status status = resolve(host, port, false, &addresses);
      loop_.post([this, node, status, addresses] { resolved(node, status, addresses); });
    });
    return;
  }
  Fd fd;
  ++dialling.under_way;
  const Address& address = dialling.addresses[dialling.next_address];
  if (const Status s = start_connect(address, options_.socket, &fd); !s.ok()) {
    dial_failed(neighbour, s.text, s.error_number == ECONNREFUSED);
  } else {
    add_pending(std::move(fd), Role::kDialer, neighbour.name);
  }
}

void Connections::resolved(const NodeName& node, const Status& status,
                           std::vector<Address> addresses) {
  Neighbour& neighbour = neighbour_of(node);
  neighbour.dialling.resolving = false;
  if (status.ok()) {
    neighbour.dialling.addresses = std::move(addresses);
    neighbour.dialling.next_address = 0;
    schedule(neighbour, kNow);
  } else {
    ++neighbour.dialling.under_way;
    dial_failed(neighbour, status.text, false);
  }
}

void Connections::dial_failed(Neighbour& neighbour, const std::string& reason, bool final) {
  Dialling& dialling = neighbour.dialling;
  --dialling.under_way;
  if (dialling.next_address + 1 < dialling.addresses.size()) {
    ++dialling.next_address;
    schedule(neighbour, kNow);
    return;
  }
  const bool refused = final && dialling.under_way == 0 && is_final_word(neighbour);
  dialling.next_address = 0;
  schedule(neighbour, backoff(++dialling.failures));
  if (!neighbour.links.empty()) return;
  dialling.last_error = "could not connect to " + neighbour.host + " port " +
                        std::to_string(neighbour.port) + ": " + reason;
  if (refused) give_up(neighbour);
}

// A refusal where the node usually accepts, or at the address that it called us from. Elsewhere it
// may come from something between us, and the node may still call.
bool Connections::is_final_word(const Neighbour& neighbour) const {
  if (we_dial_first(neighbour.name)) return true;
  const Dialling& dialling = neighbour.dialling;
  return !dialling.addresses.empty() &&
         host_text(dialling.addresses[dialling.next_address]) == neighbour.origin;
}

void Connections::link_came(Neighbour& neighbour) {
  neighbour.lost_at = Time::max();
  if (missing(neighbour) > 0)
    schedule(neighbour, we_dial_first(neighbour.name) ? kNow : kTheirTurn);
}

// Told after the link is gone. Both ends dial at once when none is left.
void Connections::link_broke(Neighbour& neighbour, Clock::duration lived) {
  Dialling& dialling = neighbour.dialling;
  if (!client_->needs(neighbour.name)) return;
  dialling.failures = lived < kSoon ? dialling.failures + 1 : 0;
  const unsigned waits = dialling.failures > 0 ? dialling.failures - 1 : 0;
  const bool at_once = neighbour.links.empty() || we_dial_first(neighbour.name);
  schedule(neighbour, backoff(waits) + (at_once ? kNow : kTheirTurn));
  if (neighbour.links.empty() && neighbour.lost_at == Time::max())
    neighbour.lost_at = Clock::now() + options_.patience;
}

void Connections::give_up(Neighbour& neighbour) {
  neighbour.lost_at = neighbour.dialling.next_try = Time::max();
  std::string reason = neighbour.broke;
  const auto add = [&reason](const std::string& text) {
    if (!text.empty()) reason += (reason.empty() ? "" : "; then ") + text;
  };
  add(neighbour.dialling.last_error);
  if (neighbour.dialling.last_error.empty())
    add(to_string(neighbour.name) + " did not connect within " + seconds(options_.patience));
  add(accept_error_);
  client_->on_node_lost(neighbour.name, reason);
}

void Connections::watch_patience(Neighbour& neighbour, Time now) {
  if (neighbour.lost_at == Time::max() && neighbour.dialling.next_try == Time::max()) return;
  if (!client_->needs(neighbour.name)) {
    neighbour.lost_at = neighbour.dialling.next_try = Time::max();
  } else if (neighbour.lost_at <= now) {
    give_up(neighbour);
  }
}

}  // namespace atoll_core::engine
