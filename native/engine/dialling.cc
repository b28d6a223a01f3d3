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
// So much later it is most likely through, over whichever way.
constexpr Clock::duration kTheirCall = std::chrono::seconds(2);
// Of an address before the next one is dialled beside it.
constexpr Clock::duration kHeadStart = std::chrono::milliseconds(250);
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
  place(neighbour, host, port);
  neighbour.wanted = connections;
  neighbour.dialling.failures = 0;
  neighbour.dialling.in_vain = false;
  if (missing(neighbour) > 0) schedule(neighbour, our_turn(neighbour) ? kNow : kTheirTurn);
  if (!neighbour.links.empty()) return;
  neighbour.broke.clear();
  neighbour.dialling.last_error.clear();
  neighbour.dialling.refusal = Refusal::kNot;
  neighbour.lost_at = Clock::now() + options_.patience;
}

void Connections::reach(const NodeName& node, const std::string& host, std::uint16_t port) {
  Neighbour& neighbour = neighbour_of(node);
  place(neighbour, host, port);
  neighbour.dialling.asked = true;
  race(neighbour);
}

std::string Connections::stop_reaching(const NodeName& node) {
  Neighbour& neighbour = neighbour_of(node);
  neighbour.dialling.asked = false;
  neighbour.dialling.one_way = true;
  return why_unreached(neighbour);
}

// Where it can be found. What is known of another place counts no more.
void Connections::place(Neighbour& neighbour, const std::string& host, std::uint16_t port) {
  if (neighbour.host == host && neighbour.port == port) return;
  stop_race(neighbour);
  Dialling fresh;
  fresh.under_way = neighbour.dialling.under_way;
  fresh.place = ++num_places_;
  neighbour.dialling = std::move(fresh);
  neighbour.host = host;
  neighbour.port = port;
  if (neighbour.wanted > 0) lose_all(neighbour, "it moved to another address");
}

unsigned Connections::missing(const Neighbour& neighbour) const {
  const auto have = static_cast<unsigned>(neighbour.links.size()) + neighbour.dialling.under_way;
  return have < neighbour.wanted ? neighbour.wanted - have : 0;
}

void Connections::schedule(Neighbour& neighbour, Clock::duration delay) {
  neighbour.dialling.next_try = Clock::now() + delay;
}

// Who cannot be dialled dials: then it is that end's turn also when links are to be filled up.
bool Connections::our_turn(const Neighbour& neighbour) const {
  return we_dial_first(neighbour.name) || (neighbour.dialling.won && neighbour.origin.empty());
}

// The first link alone: it shows whether the node is there at all, and where.
void Connections::dial(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  dialling.next_try = Time::max();
  if (!client_->needs(neighbour.name)) return;
  if (neighbour.links.empty()) {
    race(neighbour);
    return;
  }
  const unsigned most = our_turn(neighbour) ? kDialsAtOnce : 1;
  while (missing(neighbour) > 0 && dialling.under_way < most && has_candidates(neighbour) &&
         dialling.next_try == Time::max()) {
    dial_one(neighbour, 0, false);
  }
}

// One candidate after the other, each with a head start; the first that says the right hello wins.
void Connections::race(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  if (dialling.racing || !has_candidates(neighbour)) return;
  dialling.racing = true;
  dialling.refusal = Refusal::kSaidNo;
  dialling.next_candidate = 0;
  dialling.errors.clear();
  race_on(neighbour);
}

void Connections::race_on(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  const std::size_t candidate = dialling.next_candidate++;
  const bool more = dialling.next_candidate < dialling.candidates.size();
  dialling.next_start = more ? Clock::now() + kHeadStart : Time::max();
  ++dialling.in_race;
  dial_one(neighbour, candidate, true);
}

void Connections::watch_race(Neighbour& neighbour, Time now) {
  if (neighbour.dialling.next_start <= now) race_on(neighbour);
}

void Connections::dial_one(Neighbour& neighbour, std::size_t candidate, bool raced) {
  Dialling& dialling = neighbour.dialling;
  ++dialling.under_way;
  const Candidate to = dialling.candidates[candidate];
  Fd fd;
  if (const Status s = start_connect(to.address, options_.socket, &fd); !s.ok()) {
    dial_failed(neighbour, to.text, raced, s.text,
                s.error_number == ECONNREFUSED ? Refusal::kClosedPort : Refusal::kNot);
  } else {
    add_pending(std::move(fd), Role::kDialer, neighbour.name, to.text, raced);
  }
}

// A dial has become a link.
void Connections::dial_came(Neighbour& neighbour, const std::string& where, bool raced) {
  Dialling& dialling = neighbour.dialling;
  --dialling.under_way;
  dialling.won = true;
  dialling.one_way = false;
  const auto winner = std::ranges::find(dialling.candidates, where, &Candidate::text);
  if (winner != dialling.candidates.end())
    std::rotate(dialling.candidates.begin(), winner, winner + 1);
  if (!raced || !dialling.racing) return;
  --dialling.in_race;
  stop_race(neighbour);
  if (std::exchange(dialling.asked, false)) client_->on_reached(neighbour.name, where);
}

// Those that are still under way are given up.
void Connections::stop_race(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  std::vector<Token> others;
  for (const auto& [token, pending] : pending_) {
    if (pending.raced && pending.target == neighbour.name) others.push_back(token);
  }
  for (const Token token : others) {
    const Pending pending = std::move(pending_.extract(token).mapped());
    count_bytes(*pending.stream);
    loop_.unwatch(pending.stream->fd());
    --dialling.under_way;
  }
  dialling.racing = false;
  dialling.in_race = 0;
  dialling.next_start = Time::max();
}

void Connections::dial_failed(Neighbour& neighbour, const std::string& where, bool raced,
                              const std::string& reason, Refusal refusal) {
  Dialling& dialling = neighbour.dialling;
  --dialling.under_way;
  const std::string text = "could not connect to " + where + ": " + reason;
  if (!raced) {
    dialling.errors = text;
    if (!dialling.candidates.empty())
      std::rotate(dialling.candidates.begin(), dialling.candidates.begin() + 1,
                  dialling.candidates.end());
    pass_failed(neighbour, refusal);
    return;
  }
  --dialling.in_race;
  dialling.refusal = std::min(dialling.refusal, refusal);
  dialling.errors += (dialling.errors.empty() ? "" : "; ") + text;
  if (dialling.next_candidate < dialling.candidates.size()) {
    race_on(neighbour);
  } else if (dialling.in_race == 0) {
    dialling.racing = false;
    pass_failed(neighbour, dialling.refusal);
  }
}

// No candidate is left.
void Connections::pass_failed(Neighbour& neighbour, Refusal refusal) {
  Dialling& dialling = neighbour.dialling;
  schedule(neighbour, backoff(++dialling.failures));
  dialling.in_vain = true;
  dialling.refusal = refusal;
  conclude(neighbour);
}

// What the last pass says of the node; a name that is being looked up may still say otherwise.
void Connections::conclude(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  const bool open = !dialling.resolving.empty();
  if (!open && std::exchange(dialling.asked, false)) {
    dialling.one_way = true;
    client_->on_unreached(neighbour.name, dialling.errors);
  }
  if (!neighbour.links.empty()) return;
  dialling.last_error = dialling.errors;
  if (open && !dialling.won) return;
  if (dialling.under_way == 0 && is_final_word(neighbour, dialling.refusal)) give_up(neighbour);
}

// Where it was dialled before, or called us from, a closed port means that the process is gone.
// Else something between us may refuse, and the node, which has its turn, may still call.
bool Connections::is_final_word(const Neighbour& neighbour, Refusal refusal) const {
  const Dialling& dialling = neighbour.dialling;
  if (refusal == Refusal::kNot || (dialling.one_way && refusal == Refusal::kClosedPort)) return false;
  if (refusal == Refusal::kSaidNo && we_dial_first(neighbour.name)) return true;
  if (dialling.won) return true;
  const bool had_its_turn =
      neighbour.lost_at != Time::max() &&
      Clock::now() >= neighbour.lost_at - options_.patience + kTheirTurn + kTheirCall;
  if (we_dial_first(neighbour.name)) return had_its_turn;
  return std::ranges::any_of(dialling.candidates, [&](const Candidate& each) {
    return host_text(each.address) == neighbour.origin;
  });
}

// A link that the other end dialled while our own dials failed: so it goes one way only. Links that
// broke say nothing of that: of a process that died, others may come through after the first broke.
void Connections::link_came(Neighbour& neighbour, bool dialled) {
  neighbour.lost_at = Time::max();
  neighbour.dialling.refusal = Refusal::kNot;
  if (!dialled && !neighbour.dialling.won && neighbour.dialling.in_vain)
    neighbour.dialling.one_way = true;
  if (missing(neighbour) > 0) schedule(neighbour, our_turn(neighbour) ? kNow : kTheirTurn);
}

// Told after the link is gone. Both ends dial at once when none is left.
void Connections::link_broke(Neighbour& neighbour, Clock::duration lived) {
  Dialling& dialling = neighbour.dialling;
  if (!client_->needs(neighbour.name)) return;
  dialling.failures = lived < kSoon ? dialling.failures + 1 : 0;
  const unsigned waits = dialling.failures > 0 ? dialling.failures - 1 : 0;
  const bool at_once = neighbour.links.empty() || our_turn(neighbour);
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
  if (neighbour.dialling.last_error.empty()) {
    add(why_unreached(neighbour));
    add(to_string(neighbour.name) + " did not connect within " + seconds(options_.patience));
  }
  add(accept_error_);
  client_->on_node_lost(neighbour.name, reason);
}

// What came of the race until now.
std::string Connections::why_unreached(const Neighbour& neighbour) const {
  const Dialling& dialling = neighbour.dialling;
  std::string text = dialling.racing || !dialling.resolving.empty() ? dialling.errors : "";
  for (const auto& [token, pending] : pending_) {
    if (pending.raced && pending.target == neighbour.name)
      text += (text.empty() ? "" : "; ") + ("no answer from " + pending.where);
  }
  for (const std::string& name : dialling.resolving)
    text += (text.empty() ? "" : "; ") + ("the name of " + name + " is not found yet");
  return text;
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
