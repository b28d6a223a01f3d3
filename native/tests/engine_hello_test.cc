// The hello, both halves against each other without a socket: who holds the key gets through,
// nobody else.
#include <functional>
#include <vector>

#include "engine/hello.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;
using Bytes = std::vector<std::uint8_t>;

Credentials credentials(const std::string& peer, const std::string& run = "run",
                        Bytes key = {1, 2, 3}) {
  return {run, {peer, 0}, std::move(key), 77};
}

Nonce nonce(std::uint8_t first) {
  Nonce nonce{};
  nonce[0] = first;
  return nonce;
}

// Bytes from one end to the other, as its `wants` asks for them; false if they were refused.
bool hand_over(Bytes& from, Hello& to, Bytes& answer) {
  while (to.wants() > 0 && from.size() >= to.wants()) {
    const auto end = from.begin() + static_cast<std::ptrdiff_t>(to.wants());
    const Bytes heard(from.begin(), end);
    from.erase(from.begin(), end);
    if (!to.take(heard, &answer).ok()) return false;
  }
  return true;
}

struct Outcome {
  bool dialer = false;
  bool acceptor = false;
  bool refused = false;
  std::size_t said_to_stranger = 0;
};

using Tamper = std::function<void(Bytes&)>;

Outcome meet(
    const Credentials& dialing, const Credentials& accepting, const NodeName& target,
    const Tamper& tamper = [](Bytes&) {}) {
  Hello dialer(Role::kDialer, dialing, target, nonce(1));
  Hello acceptor(Role::kAcceptor, accepting, {}, nonce(2));
  Bytes to_acceptor = dialer.opening();
  Bytes to_dialer;
  tamper(to_acceptor);
  bool open = hand_over(to_acceptor, acceptor, to_dialer);
  for (int turn = 0; turn < 3 && open; ++turn) {
    open = hand_over(to_dialer, dialer, to_acceptor) && hand_over(to_acceptor, acceptor, to_dialer);
  }
  return {dialer.done(), acceptor.done(), dialer.refused(), to_dialer.size()};
}

void both_ends_get_through_and_know_each_other() {
  const Outcome outcome = meet(credentials("a"), credentials("b"), {"b", 0});
  CHECK(outcome.dialer && outcome.acceptor && !outcome.refused);
}

void another_key_is_found_by_the_acceptor_and_reported_by_the_dialer() {
  const Outcome outcome = meet(credentials("a", "run", {9}), credentials("b"), {"b", 0});
  CHECK(!outcome.dialer && !outcome.acceptor && outcome.refused);
}

void other_runs_targets_and_versions_hear_nothing() {
  CHECK(meet(credentials("a", "other"), credentials("b"), {"b", 0}).said_to_stranger == 0);
  CHECK(meet(credentials("a"), credentials("b"), {"c", 0}).said_to_stranger == 0);
  CHECK(meet(credentials("a"), credentials("b"), {"b", 1}).said_to_stranger == 0);
  const auto other_version = [](Bytes& hello) { hello[8] = 1; };
  CHECK(meet(credentials("a"), credentials("b"), {"b", 0}, other_version).said_to_stranger == 0);
}

void no_byte_of_a_hello_can_be_changed() {
  for (std::size_t at = 0; at < kHelloBytes; ++at) {
    const Outcome outcome = meet(credentials("a"), credentials("b"), {"b", 0},
                                 [at](Bytes& hello) { hello[at] ^= 0x40; });
    CHECK(!outcome.acceptor && !outcome.dialer);
  }
}

void proofs_are_worth_nothing_in_the_other_direction_or_on_another_connection() {
  const Credentials ours = credentials("a");
  const Credentials theirs = credentials("b");
  Hello dialer(Role::kDialer, ours, {"b", 0}, nonce(1));
  Hello acceptor(Role::kAcceptor, theirs, {}, nonce(2));
  Bytes to_acceptor = dialer.opening();
  const Bytes recorded_hello = to_acceptor;
  Bytes to_dialer;
  CHECK(hand_over(to_acceptor, acceptor, to_dialer));
  CHECK(hand_over(to_dialer, dialer, to_acceptor));
  const Bytes recorded_proof = to_acceptor;
  Bytes ignored;
  Bytes reflected = recorded_proof;
  CHECK(!hand_over(reflected, dialer, ignored));

  Hello later(Role::kAcceptor, theirs, {}, nonce(3));
  Bytes replayed = recorded_hello;
  replayed.insert(replayed.end(), recorded_proof.begin(), recorded_proof.end());
  CHECK(!hand_over(replayed, later, ignored));
  CHECK(!later.done());
}

}  // namespace

int main() {
  both_ends_get_through_and_know_each_other();
  another_key_is_found_by_the_acceptor_and_reported_by_the_dialer();
  other_runs_targets_and_versions_hear_nothing();
  no_byte_of_a_hello_can_be_changed();
  proofs_are_worth_nothing_in_the_other_direction_or_on_another_connection();
  return atoll_test::failures() == 0 ? 0 : 1;
}
