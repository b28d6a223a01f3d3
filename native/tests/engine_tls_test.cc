// A TLS stream against OpenSSL's own record layer: whatever either does that TLS 1.3 allows, the
// other reads; whatever happens to a record on its way, nothing of it is taken for data.
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "engine/owned.h"
#include "engine/tls.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;
using Bytes = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

constexpr std::size_t kHeaderBytes = 5;
constexpr int kMostTurns = 100'000;  // of a test that cannot end

std::string text_of(const std::string& name) {
  std::ifstream file(std::string(ATOLL_TEST_CERTIFICATES "/") + name);
  std::stringstream text;
  text << file.rdbuf();
  CHECK(!text.str().empty());
  return text.str();
}

std::unique_ptr<Tls> our_tls(std::uint64_t records_per_key) {
  TlsOptions options{text_of("peer.pem"), text_of("peer.key"), text_of("authority.pem"),
                     records_per_key};
  std::unique_ptr<Tls> tls;
  CHECK(Tls::create(options, &tls).ok());
  return tls;
}

// The other end, on memory: what it sends can be bent on its way.
class Peer {
 public:
  Peer(int fd, bool dials, const char* ciphersuite) : fd_(fd), context_(SSL_CTX_new(TLS_method())) {
    SSL_CTX* context = context_.get();
    const auto path = [](const char* name) {
      return std::string(ATOLL_TEST_CERTIFICATES "/") + name;
    };
    SSL_CTX_set_ciphersuites(context, ciphersuite);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_use_certificate_chain_file(context, path("peer.pem").c_str());
    SSL_CTX_use_PrivateKey_file(context, path("peer.key").c_str(), SSL_FILETYPE_PEM);
    session_.reset(SSL_new(context));
    SSL_set_bio(session(), BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    if (dials) {
      SSL_set_connect_state(session());
    } else {
      SSL_set_accept_state(session());
    }
  }
  ~Peer() { close(fd_); }

  SSL* session() { return session_.get(); }
  SSL_CTX* context() { return context_.get(); }
  bool shake() { return SSL_do_handshake(session()) == 1; }

  // What it has sealed and nobody has sent yet.
  Bytes sealed() {
    Bytes bytes(BIO_ctrl_pending(SSL_get_wbio(session())));
    BIO_read(SSL_get_wbio(session()), bytes.data(), static_cast<int>(bytes.size()));
    return bytes;
  }
  void to_socket(const Bytes& bytes) {
    waiting_.insert(waiting_.end(), bytes.begin(), bytes.end());
  }
  // Both ways, as far as the socket goes.
  void pump() {
    to_socket(sealed());
    const ssize_t sent = ::send(fd_, waiting_.data(), waiting_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) waiting_.erase(waiting_.begin(), waiting_.begin() + sent);
    std::array<std::uint8_t, 50'000> bytes;
    const ssize_t got = ::recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) BIO_write(SSL_get_rbio(session()), bytes.data(), static_cast<int>(got));
  }

 private:
  int fd_;
  Owned<SSL_CTX, SSL_CTX_free> context_;
  Owned<SSL, SSL_free> session_;
  Bytes waiting_;
};

// Our stream and a peer that have shaken hands.
struct Pair {
  explicit Pair(bool we_dial, const char* ciphersuite = "TLS_AES_128_GCM_SHA256",
                std::uint64_t records_per_key = 1u << 23)
      : tls(our_tls(records_per_key)) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    ours = tls->open(Fd(ends[0]), we_dial);
    peer = std::make_unique<Peer>(ends[1], !we_dial, ciphersuite);
  }
  void shake() {
    bool we = false, they = false;
    for (int turn = 0; turn < kMostTurns && !(we && they); ++turn) {
      if (!we) {
        const Status status = ours->handshake(&we);
        if (!status.ok()) {
          std::fprintf(stderr, "no handshake: %s\n", status.text.c_str());
          std::exit(1);
        }
      }
      they = peer->shake();
      peer->pump();
    }
    CHECK(we && they);
    CHECK(ours->flush().ok() && !ours->has_unsent());
  }

  std::unique_ptr<Tls> tls;
  std::unique_ptr<Stream> ours;
  std::unique_ptr<Peer> peer;
};

Bytes some(Random& random, std::size_t bytes) {
  Bytes out(bytes);
  for (auto& byte : out) byte = static_cast<std::uint8_t>(random());
  return out;
}

// Into one or two parts between guards; appends what came.
Status read_some(Random& random, Stream& stream, Bytes* to) {
  constexpr std::uint8_t kUntouched = 0xA5;
  const std::size_t first = 1 + random() % (random() % 2 == 0 ? 100 : 60'000);
  const std::size_t second = random() % 2 == 0 ? 0 : 64;
  Bytes memory(first + second + 48, kUntouched);
  const iovec parts[2] = {{memory.data() + 16, first}, {memory.data() + 32 + first, second}};
  Stream::Moved moved;
  const Status status = stream.read({parts, second == 0 ? 1u : 2u}, &moved);
  CHECK(moved.bytes <= first + second);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (i < 16 || (i >= 16 + first && i < 32 + first) || i >= 32 + first + second)
      CHECK(memory[i] == kUntouched);
  }
  const std::size_t of_first = std::min(first, moved.bytes);
  to->insert(to->end(), memory.begin() + 16, memory.begin() + 16 + of_first);
  const auto rest = memory.begin() + 32 + static_cast<std::ptrdiff_t>(first);
  to->insert(to->end(), rest, rest + static_cast<std::ptrdiff_t>(moved.bytes - of_first));
  return status;
}

// Up to three parts of what is left to send.
Status write_some(Random& random, Stream& stream, const Bytes& from, std::size_t* done) {
  std::array<iovec, 3> parts;
  std::size_t at = *done;
  for (iovec& part : parts) {
    const std::size_t most = random() % 3 == 0 ? 64 : 200'000;
    const std::size_t bytes = std::min<std::size_t>(random() % most, from.size() - at);
    part = {const_cast<std::uint8_t*>(from.data()) + at, bytes};
    at += bytes;
  }
  Stream::Moved moved;
  const Status status = stream.write(parts, &moved);
  *done += moved.bytes;
  return status;
}

void both_read_what_the_other_says(std::uint64_t seed, bool we_dial, const char* ciphersuite) {
  Random random(seed);
  Pair pair(we_dial, ciphersuite, 1 + random() % 40);
  Peer& peer = *pair.peer;
  if (random() % 2 == 0) SSL_set_block_padding(peer.session(), 1 + random() % 3000);
  SSL_set_max_send_fragment(peer.session(), 512 + random() % (16384 - 511));
  pair.shake();
  CHECK(std::string(ciphersuite) == SSL_get_cipher_name(peer.session()));
  const Bytes to_peer = some(random, random() % 2'000'000);
  const Bytes to_us = some(random, random() % 2'000'000);
  Bytes at_peer, at_us;
  std::size_t sent = 0, told = 0;
  Bytes buffer(100'000);
  for (int turn = 0; turn < kMostTurns; ++turn) {
    if (at_peer.size() == to_peer.size() && at_us.size() == to_us.size()) break;
    CHECK(write_some(random, *pair.ours, to_peer, &sent).ok());
    CHECK(read_some(random, *pair.ours, &at_us).ok());
    if (told < to_us.size() && random() % 3 != 0) {
      const std::size_t bytes = std::min<std::size_t>(1 + random() % 50'000, to_us.size() - told);
      std::size_t took = 0;
      CHECK(SSL_write_ex(peer.session(), to_us.data() + told, bytes, &took) == 1);
      told += took;
      // A new key, and often one of ours in return.
      if (random() % 8 == 0) {
        const bool both = random() % 2 == 0;
        SSL_key_update(peer.session(),
                       both ? SSL_KEY_UPDATE_REQUESTED : SSL_KEY_UPDATE_NOT_REQUESTED);
      }
    }
    peer.pump();
    std::size_t got = 0;
    while (SSL_read_ex(peer.session(), buffer.data(), buffer.size(), &got) == 1)
      at_peer.insert(at_peer.end(), buffer.data(), buffer.data() + got);
  }
  CHECK(at_peer == to_peer);
  CHECK(at_us == to_us);
  CHECK(!pair.ours->has_buffered());
  if (atoll_test::failures() > 0) std::fprintf(stderr, "%s\n", ciphersuite);
}

// Records of known data as the peer seals them, bent; returns what we made of them.
Status receive_bent(Random& random, const std::function<void(std::vector<Bytes>&)>& bend,
                    std::size_t honest_before, std::string* peer_hears = nullptr) {
  Pair pair(random() % 2 == 0);
  pair.shake();
  std::vector<Bytes> records;
  const Bytes plain = some(random, 2000);
  for (int i = 0; i < 4; ++i) {
    std::size_t took = 0;
    SSL_write_ex(pair.peer->session(), plain.data(), plain.size(), &took);
    records.push_back(pair.peer->sealed());
  }
  bend(records);
  for (const Bytes& record : records) pair.peer->to_socket(record);
  pair.peer->pump();
  Bytes got;
  Status status = success();
  for (int turn = 0; turn < 200 && status.ok(); ++turn) {
    const std::size_t before = got.size();
    status = read_some(random, *pair.ours, &got);
    if (!status.ok()) got.resize(before);
  }
  CHECK(got.size() <= honest_before * plain.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == plain[i % plain.size()]);
  if (peer_hears != nullptr) {
    pair.peer->pump();
    ERR_clear_error();
    std::uint8_t byte;
    std::size_t none = 0;
    CHECK(SSL_read_ex(pair.peer->session(), &byte, 1, &none) != 1);
    const char* reason = ERR_reason_error_string(ERR_peek_last_error());
    *peer_hears = reason == nullptr ? "" : reason;
  }
  return status;
}

void a_bent_record_is_refused_and_both_ends_know(Random& random) {
  std::string heard;
  const auto flip = [&](std::vector<Bytes>& records) {
    Bytes& record = records[2];
    const std::size_t at = kHeaderBytes + random() % (record.size() - kHeaderBytes);
    record[at] ^= static_cast<std::uint8_t>(1u << (random() % 8));
  };
  const Status status = receive_bent(random, flip, 2, &heard);
  CHECK(status.kind == Kind::kRefused && status.text == "TLS: a record does not open");
  CHECK(heard.find("bad record mac") != std::string::npos);
}

void records_come_once_and_in_order(Random& random) {
  using Several = std::vector<Bytes>;
  const auto twice = [](Several& records) { records.insert(records.begin(), records[0]); };
  const auto swapped = [](Several& records) { std::swap(records[1], records[2]); };
  const auto missing = [](Several& records) { records.erase(records.begin() + 1); };
  const auto of_another_type = [](Several& records) { records[1][0] = 22; };
  const auto too_short = [](Several& records) { records[1] = {23, 3, 3, 0, 16}; };
  const auto too_long = [](Several& records) { records[1][3] = 0x42; };
  const std::vector<std::function<void(Several&)>> bends{
      twice, swapped, missing, of_another_type, too_short, too_long};
  for (const auto& bend : bends) CHECK(receive_bent(random, bend, 1).kind == Kind::kRefused);
  // The rest of it may yet come.
  const auto cut = [](Several& records) { records[3].pop_back(); };
  CHECK(receive_bent(random, cut, 3).ok());
}

void an_end_is_told_from_a_fault() {
  Random random(1);
  Bytes got;
  {
    Pair pair(true);
    pair.shake();
    SSL_shutdown(pair.peer->session());
    pair.peer->pump();
    const Status status = read_some(random, *pair.ours, &got);
    CHECK(status.kind == Kind::kBroken && got.empty());
  }
  Pair pair(false);
  pair.shake();
  pair.ours->say_goodbye();
  pair.peer->pump();
  std::uint8_t byte;
  const int result = SSL_read(pair.peer->session(), &byte, 1);
  CHECK(SSL_get_error(pair.peer->session(), result) == SSL_ERROR_ZERO_RETURN);
}

void messages_that_no_engine_sends_are_refused() {
  Random random(2);
  Bytes got;
  Pair pair(true);
  SSL_set_num_tickets(pair.peer->session(), 1);
  pair.shake();
  pair.peer->pump();
  const Status status = read_some(random, *pair.ours, &got);
  CHECK(status.kind == Kind::kRefused && status.text == "TLS: an unexpected message");
}

void keys_without_data_between_them_are_refused() {
  Random random(3);
  Bytes got;
  Pair pair(false);
  pair.shake();
  Status status = success();
  int updates = 0;
  for (; updates < 100 && status.ok(); ++updates) {
    SSL_key_update(pair.peer->session(), SSL_KEY_UPDATE_NOT_REQUESTED);
    CHECK(SSL_do_handshake(pair.peer->session()) == 1);
    pair.peer->pump();
    status = read_some(random, *pair.ours, &got);
  }
  CHECK(status.kind == Kind::kRefused && updates > 10 && got.empty());
}

// How many new keys a peer gets with so many records of ours.
int keys_with(std::uint64_t records_per_key, int records, bool it_asks) {
  Random random(4);
  Pair pair(true, "TLS_AES_128_GCM_SHA256", records_per_key);
  pair.shake();
  int keys = 0;
  SSL_set_msg_callback_arg(pair.peer->session(), &keys);
  SSL_set_msg_callback(pair.peer->session(), [](int sent, int, int type, const void* message,
                                                std::size_t bytes, SSL*, void* count) {
    const bool handshake = sent == 0 && type == SSL3_RT_HANDSHAKE && bytes > 0;
    if (handshake && *static_cast<const std::uint8_t*>(message) == SSL3_MT_KEY_UPDATE)
      ++*static_cast<int*>(count);
  });
  if (it_asks) {
    SSL_key_update(pair.peer->session(), SSL_KEY_UPDATE_REQUESTED);
    CHECK(SSL_do_handshake(pair.peer->session()) == 1);
    pair.peer->pump();
    Bytes none;
    CHECK(read_some(random, *pair.ours, &none).ok() && none.empty());
  }
  for (int i = 0; i < records; ++i) {
    std::uint8_t byte = 7;
    const iovec part{&byte, 1};
    Stream::Moved moved;
    CHECK(pair.ours->write({&part, 1}, &moved).ok() && moved.bytes == 1);
    pair.peer->pump();
    CHECK(SSL_read(pair.peer->session(), &byte, 1) == 1 && byte == 7);
  }
  return keys;
}

void keys_are_renewed_when_worn_or_asked_for() {
  CHECK(keys_with(1000, 20, false) == 0);
  CHECK(keys_with(1000, 20, true) == 1);
  CHECK(keys_with(5, 20, false) == 3);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const std::uint64_t last = argc > 1 ? first : 7;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    Random random(seed);
    for (const char* ciphersuite : {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384",
                                    "TLS_CHACHA20_POLY1305_SHA256"})
      both_read_what_the_other_says(seed, random() % 2 == 0, ciphersuite);
    a_bent_record_is_refused_and_both_ends_know(random);
    records_come_once_and_in_order(random);
    if (atoll_test::failures() == 0) continue;
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    return 1;
  }
  an_end_is_told_from_a_fault();
  messages_that_no_engine_sends_are_refused();
  keys_without_data_between_them_are_refused();
  keys_are_renewed_when_worn_or_asked_for();
  return atoll_test::failures() == 0 ? 0 : 1;
}
