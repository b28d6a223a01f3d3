#include "engine/hello.h"

#include <algorithm>
#include <cstring>

#include "engine/wire.h"

namespace atoll_core::engine {
namespace {

constexpr std::array<std::uint8_t, 8> kMagic = {'A', 'T', 'O', 'L', 'L', '-', '1', '\n'};
constexpr std::uint32_t kVersion = 2;
constexpr std::size_t kRunAt = 24, kNonceAt = 56, kTargetAt = 88, kPeerAt = 120;
constexpr std::size_t kInstanceAt = kPeerAt + kMaxPeerBytes;
static_assert(kInstanceAt + sizeof(std::uint64_t) == kHelloBytes);

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// Peer ids may hold any character but NUL, which therefore separates.
Sha256 hash_of(const NodeName& node) {
  return sha256(bytes_of(node.peer + '\0' + std::to_string(node.rank)));
}

}  // namespace

Hello::Hello(Role role, const Credentials& credentials, const NodeName& target, const Nonce& nonce)
    : role_(role), credentials_(credentials), nonce_(nonce), remote_(target) {
  if (role_ == Role::kDialer) ours_ = make(target);
}

std::size_t Hello::wants() const {
  switch (stage_) {
    case Stage::kMagic:
      return kMagic.size();
    case Stage::kRest:
      return kHelloBytes - kMagic.size();
    case Stage::kProof:
      return Sha256{}.size();
    case Stage::kDone:
      break;
  }
  return 0;
}

std::vector<std::uint8_t> Hello::opening() const {
  if (role_ == Role::kAcceptor) return {};
  return {ours_.begin(), ours_.end()};
}

Status Hello::take(std::span<const std::uint8_t> heard, std::vector<std::uint8_t>* say) {
  switch (stage_) {
    case Stage::kMagic:
      if (!std::equal(heard.begin(), heard.end(), kMagic.begin(), kMagic.end())) {
        return broken("the other end does not speak this protocol");
      }
      std::copy(heard.begin(), heard.end(), theirs_.begin());
      stage_ = Stage::kRest;
      return success();
    case Stage::kRest:
      std::copy(heard.begin(), heard.end(), theirs_.begin() + kMagic.size());
      return take_hello(say);
    case Stage::kProof:
      return take_proof(heard, say);
    case Stage::kDone:
      break;
  }
  return broken("bytes after the end of the hello");
}

Status Hello::take_hello(std::vector<std::uint8_t>* say) {
  NodeName from;
  if (Status status = read(theirs_, &from); !status.ok()) return status;
  if (role_ == Role::kDialer) {
    if (from != remote_)
      return broken("asked for " + to_string(remote_) + ", but " + to_string(from) + " answered");
    const Sha256 mine = proof(Role::kDialer);
    say->insert(say->end(), mine.begin(), mine.end());
  } else {
    remote_ = from;
    ours_ = make(from);
    say->insert(say->end(), ours_.begin(), ours_.end());
  }
  remote_instance_ = get<std::uint64_t>(theirs_.data() + kInstanceAt);
  stage_ = Stage::kProof;
  return success();
}

Status Hello::take_proof(std::span<const std::uint8_t> heard, std::vector<std::uint8_t>* say) {
  const Role theirs = role_ == Role::kDialer ? Role::kAcceptor : Role::kDialer;
  if (!equal_constant_time(heard, proof(theirs))) {
    return broken(to_string(remote_) + " does not hold this run's session key");
  }
  if (role_ == Role::kAcceptor) {
    const Sha256 mine = proof(Role::kAcceptor);
    say->insert(say->end(), mine.begin(), mine.end());
  }
  stage_ = Stage::kDone;
  return success();
}

HelloBytes Hello::make(const NodeName& target) const {
  HelloBytes hello{};
  std::uint8_t* at = hello.data();
  const NodeName& self = credentials_.self;
  std::memcpy(at, kMagic.data(), kMagic.size());
  put(at + 8, kVersion);
  put(at + 12, self.rank);
  put(at + 16, static_cast<std::uint32_t>(self.peer.size()));
  const Sha256 run = sha256(bytes_of(credentials_.run));
  const Sha256 addressed = hash_of(target);
  std::memcpy(at + kRunAt, run.data(), run.size());
  std::memcpy(at + kNonceAt, nonce_.data(), nonce_.size());
  std::memcpy(at + kTargetAt, addressed.data(), addressed.size());
  std::memcpy(at + kPeerAt, self.peer.data(), self.peer.size());
  put(at + kInstanceAt, credentials_.instance);
  return hello;
}

Status Hello::read(const HelloBytes& hello, NodeName* from) const {
  const std::uint8_t* at = hello.data();
  if (const auto version = get<std::uint32_t>(at + 8); version != kVersion) {
    return broken("the other end speaks version " + std::to_string(version) + ", this one " +
                  std::to_string(kVersion));
  }
  const Sha256 run = sha256(bytes_of(credentials_.run));
  if (std::memcmp(at + kRunAt, run.data(), run.size()) != 0)
    return broken("the other end belongs to another run");
  const Sha256 self = hash_of(credentials_.self);
  if (std::memcmp(at + kTargetAt, self.data(), self.size()) != 0) {
    return broken("the other end looks for another node than " + to_string(credentials_.self));
  }
  const auto length = get<std::uint32_t>(at + 16);
  if (length == 0 || length > kMaxPeerBytes) return broken("a hello with a malformed peer id");
  from->rank = get<std::uint32_t>(at + 12);
  if (from->rank >= kMostRanks) return broken("a hello of rank " + std::to_string(from->rank));
  from->peer.assign(reinterpret_cast<const char*>(at + kPeerAt), length);
  return success();
}

Sha256 Hello::proof(Role role) const {
  const HelloBytes& dialer = role_ == Role::kDialer ? ours_ : theirs_;
  const HelloBytes& acceptor = role_ == Role::kDialer ? theirs_ : ours_;
  std::array<std::uint8_t, 1 + 2 * kHelloBytes> transcript{};
  transcript[0] = static_cast<std::uint8_t>(role);
  std::copy(dialer.begin(), dialer.end(), transcript.begin() + 1);
  std::copy(acceptor.begin(), acceptor.end(), transcript.begin() + 1 + kHelloBytes);
  return hmac_sha256(credentials_.session_key, transcript);
}

}  // namespace atoll_core::engine
