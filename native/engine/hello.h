// The first words on a connection: both ends prove that they hold the session key, before anything
// else is parsed.
//
//   dialer -> acceptor   hello, 256 bytes    judged: form, version, run, whether it is meant
//   acceptor -> dialer   hello, 256 bytes
//   dialer -> acceptor   proof, 32 bytes     HMAC-SHA256(session key, role, both hellos)
//   acceptor -> dialer   proof, 32 bytes     so a stranger learns nothing without a right one
//
// A hello carries a fresh random nonce, so no proof is worth anything on another connection. All
// sizes are fixed; nothing is allocated by what a stranger says. Hello, little-endian:
//
//     0  8 bytes "ATOLL-1\n"            8  u32 version            12  u32 rank
//    16  u32 length of the peer id     20  4 zero bytes
//    24  SHA-256 of the run's name     56  32 bytes of nonce
//    88  SHA-256 of the node addressed
//   120  128 bytes: peer id, padded   248  u64 instance
//
// The instance is random and new for every engine: a name that comes with another one is another
// engine, which knows nothing of what the older one had.
//
// Owner: Connections, one per pending connection. Threads: the loop's. No I/O happens here.
// Failure: kBroken; close the connection. `refused()` tells a dialer whether another try could
// help.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/ids.h"
#include "engine/status.h"
#include "kernels/sha256.h"

namespace atoll_core::engine {

inline constexpr std::size_t kHelloBytes = 256;
inline constexpr std::size_t kMaxPeerBytes = 128;
// Of one peer. What is kept of each node that ever called is bounded by it.
inline constexpr std::uint32_t kMostRanks = 4096;
using HelloBytes = std::array<std::uint8_t, kHelloBytes>;
using Nonce = std::array<std::uint8_t, 32>;

enum class Role : std::uint8_t { kDialer = 'd', kAcceptor = 'a' };

// Who this engine is, and what it proves it by.
struct Credentials {
  std::string run;
  NodeName self;
  std::vector<std::uint8_t> session_key;
  std::uint64_t instance = 0;
};

class Hello {
 public:
  // `target` is whom a dialer wants; an acceptor learns who called.
  Hello(Role role, const Credentials& credentials, const NodeName& target, const Nonce& nonce);

  // Bytes to hand to `take` next, exactly so many; 0 when there is nothing more to hear.
  std::size_t wants() const;
  // Judges what was heard; appends what must be said to `say`.
  Status take(std::span<const std::uint8_t> heard, std::vector<std::uint8_t>* say);
  // What a dialer says first; empty for an acceptor.
  std::vector<std::uint8_t> opening() const;

  bool done() const { return stage_ == Stage::kDone; }
  // True once this end has sent its proof: if the other end hangs up now, it has refused us.
  bool refused() const { return role_ == Role::kDialer && stage_ == Stage::kProof; }
  const NodeName& remote() const { return remote_; }
  std::uint64_t remote_instance() const { return remote_instance_; }

 private:
  enum class Stage { kMagic, kRest, kProof, kDone };

  HelloBytes make(const NodeName& target) const;
  Status read(const HelloBytes& hello, NodeName* from) const;
  Sha256 proof(Role role) const;
  Status take_hello(std::vector<std::uint8_t>* say);
  Status take_proof(std::span<const std::uint8_t> heard, std::vector<std::uint8_t>* say);

  Role role_;
  const Credentials& credentials_;
  Nonce nonce_;
  NodeName remote_;
  std::uint64_t remote_instance_ = 0;
  Stage stage_ = Stage::kMagic;
  HelloBytes ours_{};
  HelloBytes theirs_{};
};

}  // namespace atoll_core::engine
