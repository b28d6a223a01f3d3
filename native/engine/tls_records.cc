#include "engine/tls_records.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/params.h>

#include <cstring>
#include <string>

namespace atoll_core::engine {
namespace {

constexpr std::size_t kMaxKeyBytes = 32;

const char* cipher_name(const SSL_CIPHER* cipher) {
  switch (SSL_CIPHER_get_protocol_id(cipher)) {
    case 0x1301:
      return "AES-128-GCM";
    case 0x1302:
      return "AES-256-GCM";
    case 0x1303:
      return "ChaCha20-Poly1305";
    default:
      return nullptr;
  }
}

void put_header(std::uint8_t* to, std::size_t sealed) {
  to[0] = static_cast<std::uint8_t>(Content::kData);  // of all, from outside
  to[1] = to[2] = 3;
  to[3] = static_cast<std::uint8_t>(sealed >> 8);
  to[4] = static_cast<std::uint8_t>(sealed);
}

}  // namespace

std::unique_ptr<TlsRecords> TlsRecords::create(const SSL_CIPHER* cipher,
                                         std::span<const std::uint8_t> secret, Way way) {
  const char* name = cipher_name(cipher);
  const EVP_MD* digest = SSL_CIPHER_get_handshake_digest(cipher);
  if (name == nullptr || digest == nullptr) return nullptr;
  std::unique_ptr<TlsRecords> records(new TlsRecords());
  records->cipher_.reset(EVP_CIPHER_fetch(nullptr, name, nullptr));
  records->context_.reset(EVP_CIPHER_CTX_new());
  records->kdf_.reset(EVP_KDF_fetch(nullptr, "HKDF", nullptr));
  records->digest_ = EVP_MD_get0_name(digest);
  records->way_ = way;
  records->secret_.assign(secret.begin(), secret.end());
  if (static_cast<std::size_t>(EVP_MD_get_size(digest)) != secret.size()) return nullptr;
  if (!records->cipher_ || !records->context_ || !records->kdf_ || !records->set_key())
    return nullptr;
  return records;
}

TlsRecords::~TlsRecords() { OPENSSL_cleanse(secret_.data(), secret_.size()); }

// ---- keys ----

bool TlsRecords::set_key() {
  std::array<std::uint8_t, kMaxKeyBytes> key;
  const auto key_bytes = static_cast<std::size_t>(EVP_CIPHER_get_key_length(cipher_.get()));
  sequence_ = 0;
  const bool set = key_bytes <= key.size() && expand("key", {key.data(), key_bytes}) &&
                   expand("iv", iv_) &&
                   EVP_CipherInit_ex(context_.get(), cipher_.get(), nullptr, key.data(), iv_.data(),
                                     way_ == Way::kSeal ? 1 : 0) == 1;
  OPENSSL_cleanse(key.data(), key.size());
  return set;
}

bool TlsRecords::next_key() {
  std::vector<std::uint8_t> next(secret_.size());
  if (!expand("traffic upd", next)) return false;
  OPENSSL_cleanse(secret_.data(), secret_.size());
  secret_ = std::move(next);
  return set_key();
}

// HKDF-Expand-Label with no context (RFC 8446, 7.1).
bool TlsRecords::expand(const char* label, std::span<std::uint8_t> out) const {
  const std::string full = std::string("tls13 ") + label;
  std::string info;
  info.push_back(static_cast<char>(out.size() >> 8));
  info.push_back(static_cast<char>(out.size()));
  info.push_back(static_cast<char>(full.size()));
  info += full;
  info.push_back(0);
  int mode = EVP_KDF_HKDF_MODE_EXPAND_ONLY;
  OSSL_PARAM params[] = {
      OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, const_cast<char*>(digest_), 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY,
                                        const_cast<std::uint8_t*>(secret_.data()), secret_.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info.data(), info.size()),
      OSSL_PARAM_construct_end()};
  const Owned<EVP_KDF_CTX, EVP_KDF_CTX_free> kdf(EVP_KDF_CTX_new(kdf_.get()));
  return kdf && EVP_KDF_derive(kdf.get(), out.data(), out.size(), params) == 1;
}

// ---- records ----

std::size_t TlsRecords::sealed_bytes(const std::uint8_t* header) {
  const std::size_t bytes =
      kRecordHeaderBytes + (static_cast<std::size_t>(header[3]) << 8) + header[4];
  const bool fits = bytes >= kRecordOverhead && bytes <= kMaxSealedBytes;
  return header[0] == static_cast<std::uint8_t>(Content::kData) && fits ? bytes : 0;
}

// The nonce is the record's number, mixed into the iv: never the same twice under one key.
bool TlsRecords::begin(const std::uint8_t* header) {
  std::array<std::uint8_t, 12> nonce = iv_;
  for (std::size_t i = 0; i < 8; ++i)
    nonce[nonce.size() - 1 - i] ^= static_cast<std::uint8_t>(sequence_ >> (8 * i));
  ++sequence_;
  return EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1 &&
         add(header, kRecordHeaderBytes, nullptr);
}

bool TlsRecords::add(const void* from, std::size_t bytes, std::uint8_t* to) {
  int done = 0;
  return bytes == 0 ||
         (EVP_CipherUpdate(context_.get(), to, &done, static_cast<const std::uint8_t*>(from),
                           static_cast<int>(bytes)) == 1 &&
          static_cast<std::size_t>(done) == bytes);
}

std::optional<std::size_t> TlsRecords::seal(Content content, std::span<const iovec> parts,
                                         std::uint8_t* to) {
  std::size_t plain = 0;
  for (const iovec& part : parts) plain += part.iov_len;
  put_header(to, plain + 1 + kTagBytes);
  if (!begin(to)) return std::nullopt;
  std::uint8_t* at = to + kRecordHeaderBytes;
  for (const iovec& part : parts) {
    if (!add(part.iov_base, part.iov_len, at)) return std::nullopt;
    at += part.iov_len;
  }
  int none = 0;
  if (!add(&content, 1, at) || EVP_CipherFinal_ex(context_.get(), at + 1, &none) != 1 ||
      EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, at + 1) != 1)
    return std::nullopt;
  return plain + kRecordOverhead;
}

std::optional<TlsRecords::Opened> TlsRecords::open(std::span<const std::uint8_t> record,
                                             std::uint8_t* to) {
  std::array<std::uint8_t, kTagBytes> tag;
  const std::uint8_t* sealed = record.data() + kRecordHeaderBytes;
  std::size_t plain = record.size() - kRecordOverhead;
  std::memcpy(tag.data(), record.data() + record.size() - kTagBytes, kTagBytes);
  std::uint8_t content = 0;
  std::array<std::uint8_t, kTagBytes> rest;  // a stream cipher leaves none
  int none = 0;
  if (!begin(record.data()) || !add(sealed, plain, to) || !add(sealed + plain, 1, &content) ||
      EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes, tag.data()) != 1 ||
      EVP_CipherFinal_ex(context_.get(), rest.data(), &none) != 1)
    return std::nullopt;
  // It may be padded, with zeros behind what it holds.
  while (content == 0 && plain > 0) content = to[--plain];
  if (content == 0 || plain > kRecordBytes) return std::nullopt;
  return Opened{content, plain};
}

}  // namespace atoll_core::engine
