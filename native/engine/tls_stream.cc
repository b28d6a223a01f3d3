#include "engine/tls_stream.h"

#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "engine/tls.h"

namespace atoll_core::engine {
namespace {

// In each direction, so many records a system call; they stay in the processor's cache.
constexpr std::size_t kRecordsAtOnce = 8;
constexpr std::size_t kBufferBytes = kRecordsAtOnce * (kRecordBytes + kRecordOverhead);
// Smaller records may be messages: they do not go straight to where data belongs.
constexpr std::size_t kDirectBytes = 256;
constexpr unsigned kMostWithoutData = 32;  // records in a row

// Of alerts and messages (RFC 8446, 4 and 6).
constexpr std::uint8_t kWarning = 1, kFatal = 2;
constexpr std::uint8_t kCloseNotify = 0, kBadRecord = 20;
constexpr std::uint8_t kKeyUpdate = 24;

Status refused(std::string text) { return {Kind::kRefused, "TLS: " + std::move(text)}; }

class TlsStream final : public Stream {
 public:
  TlsStream(Fd fd, const TlsHandshakes& shared, bool dialled, bool named,
            std::uint64_t records_per_key)
      : Stream(std::move(fd)),
        named_(named),
        records_per_key_(records_per_key),
        handshake_(std::make_unique<TlsHandshake>(shared, dialled, in_, out_)) {}

  Status handshake(bool* done) override {
    drained_ = false;
    while (true) {
      const Status failure = handshake_->go_on(done);
      if (Status s = flush(); !s.ok() && failure.ok()) return s;  // an alert may go out, or not
      if (!failure.ok()) return failure;
      if (*done) break;
      bool dry = false;
      if (Status s = refill(&dry); !s.ok() || dry) return s;
    }
    const Status status = handshake_->take_keys(&sealing_, &opening_);
    if (named_) shown_ = handshake_->shown();
    handshake_.reset();
    return status;
  }

  Status read(std::span<const iovec> parts, Moved* moved) override {
    *moved = {};
    drained_ = false;
    for (const iovec& part : parts) {
      for (std::size_t done = 0; done < part.iov_len;) {
        std::size_t got = 0;
        if (Status s = take(static_cast<std::uint8_t*>(part.iov_base) + done, part.iov_len - done,
                            &got);
            !s.ok())
          return s;
        if (got == 0) return success();
        done += got;
        moved->bytes += got;
      }
    }
    moved->more = has_buffered() || !drained_;
    return success();
  }

  Status write(std::span<const iovec> parts, Moved* moved) override {
    *moved = {};
    if (Status s = flush(); !s.ok() || has_unsent()) return s;
    if (owes_key_ || sealing_->under_this_key() >= records_per_key_) {
      if (Status s = renew_key(); !s.ok()) return s;
    }
    if (Status s = seal(parts, &moved->bytes); !s.ok()) return s;
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
  bool has_buffered() const override { return !spare_left_.empty() || !first_record().empty(); }

  bool speaks_for(const std::string& peer) const override {
    if (!named_) return true;
    const std::string name = certificate_name(peer);
    return shown_ && X509_check_host(shown_.get(), name.data(), name.size(),
                                     X509_CHECK_FLAG_NO_WILDCARDS, nullptr) == 1;
  }

  void say_goodbye() override { alert(kWarning, kCloseNotify); }

 private:
  // ---- in ----

  // Some bytes; none: not now.
  Status take(std::uint8_t* to, std::size_t room, std::size_t* got) {
    while (spare_left_.empty()) {
      const auto record = first_record();
      if (record.empty()) {
        bool dry = false;
        if (Status s = refill(&dry); !s.ok() || dry) return s;
        continue;
      }
      const std::size_t most = record.size() - std::min(record.size(), kRecordOverhead);
      const bool direct = most >= kDirectBytes && most <= room;
      if (Status s = open(record, direct ? to : spare_.data(), direct ? got : nullptr); !s.ok())
        return s;
      in_.taken(record.size());
      if (direct && *got > 0) return success();
    }
    *got = std::min(room, spare_left_.size());
    std::memcpy(to, spare_left_.data(), *got);
    spare_left_ = spare_left_.subspan(*got);
    return success();
  }

  // One that is no record counts as one, which does not open.
  std::span<const std::uint8_t> first_record() const {
    const auto held = in_.held();
    if (held.size() < kRecordHeaderBytes) return {};
    const std::size_t bytes = TlsRecords::sealed_bytes(held.data());
    if (bytes == 0) return held.first(kRecordHeaderBytes);
    return held.size() < bytes ? std::span<const std::uint8_t>() : held.first(bytes);
  }

  // Data: into `direct`, if given, or left in `spare_`. What else there is, is done here.
  Status open(std::span<const std::uint8_t> record, std::uint8_t* to, std::size_t* direct) {
    const auto opened =
        record.size() > kRecordHeaderBytes ? opening_->open(record, to) : std::nullopt;
    if (!opened) {
      alert(kFatal, kBadRecord);
      return refused("a record does not open");
    }
    const bool data = opened->content == static_cast<std::uint8_t>(Content::kData);
    without_data_ = data && opened->bytes > 0 ? 0 : without_data_ + 1;
    if (without_data_ > kMostWithoutData) return refused("records without data");
    if (!data) return hear({to, opened->bytes}, opened->content);
    if (direct != nullptr) {
      *direct = opened->bytes;
    } else {
      spare_left_ = {to, opened->bytes};
    }
    return success();
  }

  Status hear(std::span<const std::uint8_t> message, std::uint8_t content) {
    if (content == static_cast<std::uint8_t>(Content::kAlert) && message.size() == 2) {
      if (message[1] == kCloseNotify) return broken("the other end closed the connection");
      return refused(std::string("the other end says: ") + SSL_alert_desc_string_long(message[1]));
    }
    constexpr std::array<std::uint8_t, 4> update{kKeyUpdate, 0, 0, 1};
    if (content == static_cast<std::uint8_t>(Content::kHandshake) && message.size() == 5 &&
        std::ranges::equal(message.first(4), update) && message[4] <= 1) {
      owes_key_ |= message[4] == 1;
      return opening_->next_key() ? success() : refused(tls_reason());
    }
    return refused("an unexpected message");
  }

  // A read that filled less than there was room for has emptied the socket: another one need not
  // ask until epoll tells of more.
  Status refill(bool* dry) {
    *dry = drained_;
    if (drained_) return success();
    const auto room = in_.room();
    const iovec part{room.data(), room.size()};
    std::size_t got = 0;
    if (Status s = receive({&part, 1}, &got); !s.ok()) return s;
    in_.added(got);
    *dry = got == 0;
    drained_ = got < room.size();
    return success();
  }

  // ---- out ----

  // Of the parts as much as goes out at once, in full records: a header costs none of its own.
  Status seal(std::span<const iovec> parts, std::size_t* taken) {
    std::size_t skip = 0;  // of the first part
    for (std::size_t records = 0; records + 1 < kRecordsAtOnce && !parts.empty(); ++records) {
      std::array<iovec, 4> plain;
      std::size_t count = 0, bytes = 0;
      while (!parts.empty() && count < plain.size() && bytes < kRecordBytes) {
        const std::size_t some = std::min(parts[0].iov_len - skip, kRecordBytes - bytes);
        plain[count++] = {static_cast<std::uint8_t*>(parts[0].iov_base) + skip, some};
        bytes += some;
        skip += some;
        if (skip < parts[0].iov_len) break;
        parts = parts.subspan(1);
        skip = 0;
      }
      if (bytes == 0) continue;
      const auto sealed = sealing_->seal(Content::kData, {plain.data(), count}, out_.room().data());
      if (!sealed) return refused(tls_reason());
      out_.added(*sealed);
      *taken += bytes;
    }
    return success();
  }

  bool say(Content content, std::span<const std::uint8_t> message) {
    std::array<std::uint8_t, kRecordOverhead + 8> record;
    const iovec part{const_cast<std::uint8_t*>(message.data()), message.size()};
    const auto sealed = sealing_->seal(content, {&part, 1}, record.data());
    if (sealed) out_.append(record.data(), *sealed);
    return sealed.has_value();
  }

  Status renew_key() {
    constexpr std::array<std::uint8_t, 5> update{kKeyUpdate, 0, 0, 1, 0};
    owes_key_ = false;
    if (say(Content::kHandshake, update) && sealing_->next_key()) return success();
    return refused(tls_reason());
  }

  // The last that is said, if the socket has room.
  void alert(std::uint8_t level, std::uint8_t what) {
    if (!sealing_ || !say(Content::kAlert, std::array{level, what})) return;
    if (const Status ignored = flush(); !ignored.ok()) return;  // it is gone: no need to tell
  }

  bool named_;
  Owned<X509, X509_free> shown_;  // if names matter
  std::uint64_t records_per_key_;
  TlsBuffer in_{kBufferBytes};
  TlsBuffer out_{kBufferBytes};
  bool drained_ = false;
  std::unique_ptr<TlsHandshake> handshake_;  // until it is done
  std::unique_ptr<TlsRecords> sealing_;      // from then on
  std::unique_ptr<TlsRecords> opening_;
  bool owes_key_ = false;  // the other end wants a new one from us
  unsigned without_data_ = 0;
  // A record that is not given as a whole, and what is left of it.
  std::array<std::uint8_t, kMaxSealedBytes> spare_;
  std::span<const std::uint8_t> spare_left_;
};

}  // namespace

std::unique_ptr<Stream> tls_stream(Fd fd, const TlsHandshakes& shared, bool dialled, bool named,
                                   std::uint64_t records_per_key) {
  return std::make_unique<TlsStream>(std::move(fd), shared, dialled, named, records_per_key);
}

}  // namespace atoll_core::engine
