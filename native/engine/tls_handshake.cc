#include "engine/tls_handshake.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace atoll_core::engine {
namespace {

TlsHandshake& handshake_of(BIO* bio) { return *static_cast<TlsHandshake*>(BIO_get_data(bio)); }

int read_bio(BIO* bio, char* to, int bytes) {
  BIO_clear_retry_flags(bio);
  const int count = handshake_of(bio).give(to, bytes);
  if (count > 0) return count;
  BIO_set_retry_read(bio);
  return -1;
}

int write_bio(BIO* bio, const char* from, int bytes) {
  BIO_clear_retry_flags(bio);
  handshake_of(bio).keep(from, bytes);
  return bytes;
}

long control_bio(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

void hear_secret(const SSL* session, const char* line) {
  static_cast<TlsHandshake*>(SSL_get_app_data(session))->hear_secret(line);
}

}  // namespace

std::string tls_reason() {
  const char* text = ERR_reason_error_string(ERR_peek_last_error());
  return text == nullptr ? "unknown error" : text;
}

bool TlsHandshakes::prepare(SSL_CTX* context) {
  context_ = context;
  method_.reset(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "atoll handshake"));
  if (!method_) return false;
  BIO_meth_set_read(method_.get(), read_bio);
  BIO_meth_set_write(method_.get(), write_bio);
  BIO_meth_set_ctrl(method_.get(), control_bio);
  SSL_CTX_set_keylog_callback(context, hear_secret);  // OpenSSL tells its secrets in no other way
  return true;
}

TlsHandshake::TlsHandshake(const TlsHandshakes& shared, bool dialled, TlsBuffer& in, TlsBuffer& out)
    : dialled_(dialled), in_(in), out_(out), session_(SSL_new(shared.context())) {
  BIO* bio = BIO_new(shared.method());
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(session_.get(), bio, bio);
  SSL_set_app_data(session_.get(), this);
  if (dialled) {
    SSL_set_connect_state(session_.get());
  } else {
    SSL_set_accept_state(session_.get());
  }
}

Status TlsHandshake::go_on(bool* done) {
  ERR_clear_error();
  const int result = SSL_do_handshake(session_.get());
  *done = result == 1;
  if (*done) return success();
  switch (SSL_get_error(session_.get(), result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      return success();
    case SSL_ERROR_ZERO_RETURN:
      return broken("the other end closed the connection");
    default:
      break;
  }
  const long verdict = SSL_get_verify_result(session_.get());
  const bool trusted = verdict == X509_V_OK;
  return {Kind::kRefused,
          trusted ? "TLS: " + tls_reason()
                  : std::string("its certificate: ") + X509_verify_cert_error_string(verdict)};
}

Status TlsHandshake::take_keys(std::unique_ptr<TlsRecords>* sealing,
                               std::unique_ptr<TlsRecords>* opening) {
  ERR_clear_error();
  // OpenSSL asks the buffer for one record after another, so it holds nothing that comes after.
  if (SSL_has_pending(session_.get()) == 0) {
    const SSL_CIPHER* cipher = SSL_get_current_cipher(session_.get());
    const Secret& ours = dialled_ ? client_secret_ : server_secret_;
    const Secret& theirs = dialled_ ? server_secret_ : client_secret_;
    *sealing = TlsRecords::create(cipher, ours.bytes(), TlsRecords::Way::kSeal);
    *opening = TlsRecords::create(cipher, theirs.bytes(), TlsRecords::Way::kOpen);
  }
  if (*sealing && *opening) return success();
  return {Kind::kRefused, "TLS: no keys came of the handshake: " + tls_reason()};
}

Owned<X509, X509_free> TlsHandshake::shown() const {
  return Owned<X509, X509_free>(SSL_get1_peer_certificate(session_.get()));
}

int TlsHandshake::give(char* to, int bytes) {
  const auto held = in_.held();
  const std::size_t count = std::min(held.size(), static_cast<std::size_t>(bytes));
  std::memcpy(to, held.data(), count);
  in_.taken(count);
  return static_cast<int>(count);
}

void TlsHandshake::keep(const char* from, int bytes) {
  out_.append(from, static_cast<std::size_t>(bytes));
}

// One line for each secret: its name, the connection, the secret.
void TlsHandshake::hear_secret(std::string_view line) {
  const std::string_view secret = line.substr(line.rfind(' ') + 1);
  if (line.starts_with("CLIENT_TRAFFIC_SECRET_0 ")) client_secret_.read(secret);
  if (line.starts_with("SERVER_TRAFFIC_SECRET_0 ")) server_secret_.read(secret);
}

TlsHandshake::Secret::~Secret() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

void TlsHandshake::Secret::read(std::string_view hex) {
  const auto digit = [&](std::size_t i) {
    return OPENSSL_hexchar2int(static_cast<unsigned char>(hex[i]));
  };
  bytes_.resize(hex.size() / 2);
  for (std::size_t i = 0; i < bytes_.size(); ++i)
    bytes_[i] = static_cast<std::uint8_t>(16 * digit(2 * i) + digit(2 * i + 1));
}

}  // namespace atoll_core::engine
