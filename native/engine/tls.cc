#include "engine/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <string_view>
#include <utility>

#include "engine/owned.h"
#include "engine/tls_stream.h"
#include "kernels/sha256.h"

namespace atoll_core::engine {
namespace {

using Bio = Owned<BIO, BIO_free>;
using Certificate = Owned<X509, X509_free>;
using Context = Owned<SSL_CTX, SSL_CTX_free>;
using Key = Owned<EVP_PKEY, EVP_PKEY_free>;

Bio memory(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

class OpenTls final : public Tls {
 public:
  Status prepare(const TlsOptions& options) {
    context_.reset(SSL_CTX_new(TLS_method()));
    records_per_key_ = options.records_per_key;
    named_ = options.named;
    if (!context_ || !handshakes_.prepare(context_.get()))
      return bad_argument("TLS: " + tls_reason());
    SSL_CTX* context = context_.get();
    SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
    SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION);
    SSL_CTX_set_options(context, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_num_tickets(context, 0);  // sessions are never resumed
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    // The first is the fastest where processors know AES; what is sent lives as long as a run.
    SSL_CTX_set_ciphersuites(
        context, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256");
    // An engine is server and client with the one certificate it has.
    SSL_CTX_set_purpose(context, X509_PURPOSE_ANY);
    if (Status s = use_certificates(options.certificates); !s.ok()) return s;
    if (Status s = use_key(options.key); !s.ok()) return s;
    return trust(options.authorities);
  }

  std::unique_ptr<Stream> open(Fd fd, bool dialled) const override {
    return tls_stream(std::move(fd), handshakes_, dialled, named_, records_per_key_);
  }

 private:
  Status use_certificates(const std::string& pem) {
    const Bio bio = memory(pem);
    const Certificate own(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
    if (!own || SSL_CTX_use_certificate(context_.get(), own.get()) != 1)
      return bad_argument("the TLS certificate is no use: " + tls_reason());
    while (X509* next = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
      if (SSL_CTX_add0_chain_cert(context_.get(), next) == 1) continue;  // it is the context's now
      X509_free(next);
      return bad_argument("the chain of the TLS certificate is no use: " + tls_reason());
    }
    return success();
  }

  Status use_key(const std::string& pem) {
    const Bio bio = memory(pem);
    // Without a callback OpenSSL would ask for a password at the terminal.
    const auto no_password = [](char*, int, int, void*) { return 0; };
    const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
    if (!key) return bad_argument("the TLS key is no use: " + tls_reason());
    if (SSL_CTX_use_PrivateKey(context_.get(), key.get()) == 1) return success();
    return bad_argument("the TLS key does not belong to the certificate: " + tls_reason());
  }

  Status trust(const std::string& pem) {
    const Bio bio = memory(pem);
    int count = 0;
    while (const Certificate one{PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)}) {
      X509_STORE_add_cert(SSL_CTX_get_cert_store(context_.get()), one.get());
      ++count;
    }
    if (count > 0) return success();
    return bad_argument("no TLS authority could be read: " + tls_reason());
  }

  Context context_;
  TlsHandshakes handshakes_;
  std::uint64_t records_per_key_ = 0;
  bool named_ = false;
};

}  // namespace

bool tls_is_built() { return true; }

std::string certificate_name(const std::string& peer) {
  constexpr std::size_t kDigestBytes = 16;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(peer.data());
  const Sha256 digest = sha256({bytes, peer.size()});
  std::string name;
  for (std::size_t i = 0; i < kDigestBytes; ++i) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    name += kDigits[digest[i] >> 4];
    name += kDigits[digest[i] & 15];
  }
  return name + ".peer.atoll";
}

Status Tls::create(const TlsOptions& options, std::unique_ptr<Tls>* out) {
  ERR_clear_error();
  auto tls = std::make_unique<OpenTls>();
  if (Status s = tls->prepare(options); !s.ok()) return s;
  *out = std::move(tls);
  return success();
}

}  // namespace atoll_core::engine
