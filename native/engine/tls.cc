#include "engine/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace atoll_core::engine {
namespace {

constexpr std::size_t kRecordBytes = SSL3_RT_MAX_PLAIN_LENGTH;
constexpr std::size_t kBufferBytes = 128u << 10;  // in each direction: many records a system call
constexpr std::size_t kWriteBytes = 7 * kRecordBytes;

template <auto free>
struct Freeing {
  template <class T>
  void operator()(T* pointer) const {
    free(pointer);
  }
};
template <class T, auto free>
using Owned = std::unique_ptr<T, Freeing<free>>;

using Bio = Owned<BIO, BIO_free>;
using BioMethod = Owned<BIO_METHOD, BIO_meth_free>;
using Certificate = Owned<X509, X509_free>;
using Context = Owned<SSL_CTX, SSL_CTX_free>;
using Key = Owned<EVP_PKEY, EVP_PKEY_free>;
using Session = Owned<SSL, SSL_free>;

std::string reason() {
  const char* text = ERR_reason_error_string(ERR_peek_last_error());
  return text == nullptr ? "unknown error" : text;
}

Status refused(std::string text) { return {Kind::kRefused, std::move(text)}; }

Bio memory(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Bytes between OpenSSL and the socket.
class Buffer {
 public:
  std::span<std::uint8_t> room() {
    if (begin_ == end_) begin_ = end_ = 0;
    return {bytes_.data() + end_, bytes_.size() - end_};
  }
  std::span<const std::uint8_t> held() const { return {bytes_.data() + begin_, end_ - begin_}; }
  bool empty() const { return begin_ == end_; }
  void added(std::size_t bytes) { end_ += bytes; }
  void taken(std::size_t bytes) { begin_ += bytes; }
  void append(const void* from, std::size_t bytes) {
    room();
    bytes_.resize(std::max(bytes_.size(), end_ + bytes));
    std::memcpy(bytes_.data() + end_, from, bytes);
    end_ += bytes;
  }

 private:
  std::vector<std::uint8_t> bytes_ = std::vector<std::uint8_t>(kBufferBytes);
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

// OpenSSL sees the buffers and never the socket: so a write to it never fails half-way, and one
// system call moves several records.
class TlsStream final : public Stream {
 public:
  TlsStream(Fd fd, SSL_CTX* context, const BIO_METHOD* method, bool dialled)
      : Stream(std::move(fd)), session_(SSL_new(context)) {
    BIO* bio = BIO_new(method);
    BIO_set_data(bio, this);
    BIO_set_init(bio, 1);
    SSL_set_bio(session_.get(), bio, bio);
    if (dialled) {
      SSL_set_connect_state(session_.get());
    } else {
      SSL_set_accept_state(session_.get());
    }
  }

  Status handshake(bool* done) override {
    while (true) {
      ERR_clear_error();
      const int result = SSL_do_handshake(session_.get());
      const Status failure = result == 1 ? success() : judge(result);
      if (Status s = flush(); !s.ok() && failure.ok()) return s;  // an alert may go out, or not
      if (!failure.ok()) return failure;
      *done = result == 1;
      bool dry = false;
      if (*done) return success();
      if (Status s = refill(&dry); !s.ok() || dry) return s;
    }
  }

  Status read(std::span<const iovec> parts, Moved* moved) override {
    *moved = {};
    for (const iovec& part : parts) {
      for (std::size_t done = 0; done < part.iov_len;) {
        std::size_t got = 0;
        if (Status s = read_some(static_cast<std::uint8_t*>(part.iov_base) + done,
                                 part.iov_len - done, &got);
            !s.ok())
          return s;
        if (got == 0) return success();
        done += got;
        moved->bytes += got;
        moved->more = buffered_ = true;
      }
    }
    return success();
  }

  Status write(std::span<const iovec> parts, Moved* moved) override {
    *moved = {};
    if (Status s = flush(); !s.ok() || has_unsent()) return s;
    gather(parts);
    if (Status s = seal(plain_, moved); !s.ok()) return s;
    // The rest straight from where it lies.
    std::size_t skip = plain_.size();
    for (const iovec& part : parts) {
      const std::size_t skipped = std::min(skip, part.iov_len);
      skip -= skipped;
      const auto* begin = static_cast<const std::uint8_t*>(part.iov_base) + skipped;
      const std::size_t room = kWriteBytes - std::min(kWriteBytes, moved->bytes);
      if (Status s = seal({begin, std::min(part.iov_len - skipped, room)}, moved); !s.ok())
        return s;
    }
    if (Status s = flush(); !s.ok()) return s;
    moved->more = !has_unsent();
    return success();
  }

  Status flush() override {
    while (!out_.empty()) {
      const auto held = out_.held();
      const iovec part{const_cast<std::uint8_t*>(held.data()), held.size()};
      std::size_t sent = 0;
      if (Status s = send({&part, 1}, &sent); !s.ok()) return s;
      if (sent == 0) return success();
      out_.taken(sent);
    }
    return success();
  }

  bool has_unsent() const override { return !out_.empty(); }
  bool has_buffered() const override { return buffered_; }

  void say_goodbye() override {
    ERR_clear_error();
    if (SSL_is_init_finished(session_.get()) == 1) SSL_shutdown(session_.get());
    if (const Status ignored = flush(); !ignored.ok()) return;  // it is gone: no need to tell
  }

  // For the BIO.
  int give(char* to, int bytes) {
    const auto held = in_.held();
    const std::size_t count = std::min(held.size(), static_cast<std::size_t>(bytes));
    std::memcpy(to, held.data(), count);
    in_.taken(count);
    return static_cast<int>(count);
  }
  void keep(const char* from, int bytes) { out_.append(from, static_cast<std::size_t>(bytes)); }

 private:
  // The first record's worth, in one piece: a header must not cost a record of its own.
  void gather(std::span<const iovec> parts) {
    plain_.clear();
    for (const iovec& part : parts) {
      const auto* begin = static_cast<const std::uint8_t*>(part.iov_base);
      plain_.insert(plain_.end(), begin,
                    begin + std::min(part.iov_len, kRecordBytes - plain_.size()));
    }
  }

  // Into records; the BIO takes all of them.
  Status seal(std::span<const std::uint8_t> plain, Moved* moved) {
    if (plain.empty()) return success();
    ERR_clear_error();
    std::size_t taken = 0;
    const int result = SSL_write_ex(session_.get(), plain.data(), plain.size(), &taken);
    if (result != 1) return judge(result);
    moved->bytes += taken;
    return success();
  }

  Status read_some(std::uint8_t* to, std::size_t bytes, std::size_t* got) {
    while (true) {
      ERR_clear_error();
      const int result = SSL_read_ex(session_.get(), to, bytes, got);
      if (result == 1) return success();
      *got = 0;
      if (Status s = judge(result); !s.ok()) return s;
      bool dry = false;
      if (Status s = refill(&dry); !s.ok()) return s;
      if (dry) return success();
    }
  }

  // OpenSSL wants more than there is.
  Status refill(bool* dry) {
    const auto room = in_.room();
    const iovec part{room.data(), room.size()};
    std::size_t got = 0;
    if (Status s = receive({&part, 1}, &got); !s.ok()) return s;
    in_.added(got);
    *dry = got == 0;
    buffered_ = !*dry;
    return success();
  }

  Status judge(int result) {
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
    if (verdict != X509_V_OK)
      return refused(std::string("its certificate: ") + X509_verify_cert_error_string(verdict));
    return refused("TLS: " + reason());
  }

  Session session_;
  Buffer in_;
  Buffer out_;
  std::vector<std::uint8_t> plain_;
  bool buffered_ = false;
};

TlsStream& stream_of(BIO* bio) { return *static_cast<TlsStream*>(BIO_get_data(bio)); }

int read_bio(BIO* bio, char* to, int bytes) {
  BIO_clear_retry_flags(bio);
  const int count = stream_of(bio).give(to, bytes);
  if (count > 0) return count;
  BIO_set_retry_read(bio);
  return -1;
}

int write_bio(BIO* bio, const char* from, int bytes) {
  BIO_clear_retry_flags(bio);
  stream_of(bio).keep(from, bytes);
  return bytes;
}

long control_bio(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

class OpenTls final : public Tls {
 public:
  Status prepare(const TlsOptions& options) {
    context_.reset(SSL_CTX_new(TLS_method()));
    method_.reset(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "atoll stream"));
    if (!context_ || !method_) return bad_argument("TLS: " + reason());
    BIO_meth_set_read(method_.get(), read_bio);
    BIO_meth_set_write(method_.get(), write_bio);
    BIO_meth_set_ctrl(method_.get(), control_bio);
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
    return std::make_unique<TlsStream>(std::move(fd), context_.get(), method_.get(), dialled);
  }

 private:
  Status use_certificates(const std::string& pem) {
    const Bio bio = memory(pem);
    const Certificate own(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
    if (!own || SSL_CTX_use_certificate(context_.get(), own.get()) != 1)
      return bad_argument("the TLS certificate is no use: " + reason());
    while (X509* next = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
      if (SSL_CTX_add0_chain_cert(context_.get(), next) == 1) continue;  // it is the context's now
      X509_free(next);
      return bad_argument("the chain of the TLS certificate is no use: " + reason());
    }
    return success();
  }

  Status use_key(const std::string& pem) {
    const Bio bio = memory(pem);
    // Without a callback OpenSSL would ask for a password at the terminal.
    const auto no_password = [](char*, int, int, void*) { return 0; };
    const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
    if (!key) return bad_argument("the TLS key is no use: " + reason());
    if (SSL_CTX_use_PrivateKey(context_.get(), key.get()) == 1) return success();
    return bad_argument("the TLS key does not belong to the certificate: " + reason());
  }

  Status trust(const std::string& pem) {
    const Bio bio = memory(pem);
    int count = 0;
    while (const Certificate one{PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)}) {
      X509_STORE_add_cert(SSL_CTX_get_cert_store(context_.get()), one.get());
      ++count;
    }
    if (count > 0) return success();
    return bad_argument("no TLS authority could be read: " + reason());
  }

  Context context_;
  BioMethod method_;
};

}  // namespace

bool tls_is_built() { return true; }

Status Tls::create(const TlsOptions& options, std::unique_ptr<Tls>* out) {
  ERR_clear_error();
  auto tls = std::make_unique<OpenTls>();
  if (Status s = tls->prepare(options); !s.ok()) return s;
  *out = std::move(tls);
  return success();
}

}  // namespace atoll_core::engine
