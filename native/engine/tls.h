// TLS 1.3 over TCP, mutual: both ends show a certificate of the same authorities. Who is who is
// settled by the hello, which runs inside; with `named` the certificate has to bear that peer's name.
//
// Owner: Connections. Threads: the loop's, except create(). Failure: create() says in one line what
// is wrong with the certificates, or that this build has no TLS (no_tls.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/status.h"
#include "engine/stream.h"

namespace atoll_core::engine {

// All in PEM. All empty: no TLS.
struct TlsOptions {
  std::string certificates;  // this engine's, then those that lead to an authority
  std::string key;           // of the first
  std::string authorities;   // whose certificates are accepted
  // AES-GCM's margin lasts for 2^24.5 full records under one key (RFC 8446, 5.5).
  std::uint64_t records_per_key = 1u << 23;
  // Certificates hold the DNS name `certificate_name(peer)`, and nobody is taken for another peer.
  bool named = false;

  bool wanted() const { return !(certificates.empty() && key.empty() && authorities.empty()); }
};

class Tls {
 public:
  static Status create(const TlsOptions& options, std::unique_ptr<Tls>* out);
  virtual ~Tls() = default;
  // Over a connected socket, or one that will be by the time of the handshake.
  virtual std::unique_ptr<Stream> open(Fd fd, bool dialled) const = 0;
};

bool tls_is_built();

// 32 hexadecimal digits of the SHA-256 of the peer's id, and ".peer.atoll".
std::string certificate_name(const std::string& peer);

}  // namespace atoll_core::engine
