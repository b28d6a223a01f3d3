// The records of one direction of a TLS 1.3 connection whose handshake is done (RFC 8446, 5.2).
//
// The handshake and the ciphers are OpenSSL's. Its records are not used, because they copy every
// byte twice, on either side: here plain bytes are sealed from where they lie, and opened to where
// they belong. The kernel's TLS divides the work in the same way.
//
// Owner: a TlsStream. Threads: the loop's. Failure: nothing comes back, and the connection is of no
// more use.
#pragma once

#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/ssl.h>
#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/owned.h"

namespace atoll_core::engine {

// What a sealed record holds.
enum class Content : std::uint8_t { kAlert = 21, kHandshake = 22, kData = 23 };

constexpr std::size_t kRecordHeaderBytes = 5;
constexpr std::size_t kRecordBytes = 16u << 10;  // plain ones, at most
constexpr std::size_t kTagBytes = 16;
constexpr std::size_t kRecordOverhead = kRecordHeaderBytes + 1 + kTagBytes;
constexpr std::size_t kMaxSealedBytes = kRecordHeaderBytes + kRecordBytes + 256;

class TlsRecords {
 public:
  enum class Way { kOpen, kSeal };
  struct Opened {
    std::uint8_t content;
    std::size_t bytes;
  };

  // `secret`: that of the direction, from the handshake. Null if OpenSSL lacks the cipher.
  static std::unique_ptr<TlsRecords> create(const SSL_CIPHER* cipher,
                                         std::span<const std::uint8_t> secret, Way way);
  ~TlsRecords();
  TlsRecords(const TlsRecords&) = delete;
  TlsRecords& operator=(const TlsRecords&) = delete;

  // The size of a record with its header, once so much of it is there; 0 if it can be none.
  static std::size_t sealed_bytes(const std::uint8_t* header);
  // All parts, at most kRecordBytes, in one record. Returns its size; `to` has room for
  // kRecordOverhead more than the parts.
  std::optional<std::size_t> seal(Content content, std::span<const iovec> parts, std::uint8_t* to);
  // A whole record; `to` has room for kRecordOverhead less. What was put there counts only if
  // something comes back.
  std::optional<Opened> open(std::span<const std::uint8_t> record, std::uint8_t* to);

  // The key that follows this one, at both ends after the same record.
  bool next_key();
  std::uint64_t under_this_key() const { return sequence_; }

 private:
  TlsRecords() = default;
  bool set_key();
  bool expand(const char* label, std::span<std::uint8_t> out) const;
  bool begin(const std::uint8_t* header);
  bool add(const void* from, std::size_t bytes, std::uint8_t* to);

  Owned<EVP_CIPHER, EVP_CIPHER_free> cipher_;
  Owned<EVP_CIPHER_CTX, EVP_CIPHER_CTX_free> context_;
  Owned<EVP_KDF, EVP_KDF_free> kdf_;
  const char* digest_ = nullptr;  // by name
  Way way_ = Way::kOpen;
  std::vector<std::uint8_t> secret_;
  std::array<std::uint8_t, 12> iv_{};
  std::uint64_t sequence_ = 0;
};

}  // namespace atoll_core::engine
