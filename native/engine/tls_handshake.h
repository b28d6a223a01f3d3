// The handshake of one connection, by OpenSSL: who the other end is, and the keys of the records
// that follow. OpenSSL sees buffers and never the socket, so a write never fails half-way.
//
// Owner: a TlsStream, until it is done. Threads: the loop's. Failure: kRefused with what OpenSSL
// says, kBroken if the other end has closed.
#pragma once

#include <openssl/bio.h>
#include <openssl/ssl.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/owned.h"
#include "engine/status.h"
#include "engine/tls_buffer.h"
#include "engine/tls_records.h"

namespace atoll_core::engine {

// What OpenSSL said last, in a few words.
std::string tls_reason();

// What all handshakes of a context share.
class TlsHandshakes {
 public:
  // False if OpenSSL has no memory. The context outlives this.
  bool prepare(SSL_CTX* context);
  SSL_CTX* context() const { return context_; }
  const BIO_METHOD* method() const { return method_.get(); }

 private:
  SSL_CTX* context_ = nullptr;
  Owned<BIO_METHOD, BIO_meth_free> method_;
};

class TlsHandshake {
 public:
  TlsHandshake(const TlsHandshakes& shared, bool dialled, TlsBuffer& in, TlsBuffer& out);
  TlsHandshake(const TlsHandshake&) = delete;
  TlsHandshake& operator=(const TlsHandshake&) = delete;

  // As far as `in` leads; what is to be sent is in `out`, even if it fails.
  Status go_on(bool* done);
  // Once it is done: the first record of either direction comes next.
  Status take_keys(std::unique_ptr<TlsRecords>* sealing, std::unique_ptr<TlsRecords>* opening);

  // Once it is done: the certificate that the other end has shown.
  Owned<X509, X509_free> shown() const;

  // For OpenSSL.
  int give(char* to, int bytes);
  void keep(const char* from, int bytes);
  void hear_secret(std::string_view line);

 private:
  class Secret {
   public:
    ~Secret();
    void read(std::string_view hex);
    std::span<const std::uint8_t> bytes() const { return bytes_; }

   private:
    std::vector<std::uint8_t> bytes_;
  };

  bool dialled_;
  TlsBuffer& in_;
  TlsBuffer& out_;
  Secret client_secret_;
  Secret server_secret_;
  Owned<SSL, SSL_free> session_;
};

}  // namespace atoll_core::engine
