#include "engine/link.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "kernels/digest.h"

namespace atoll_core::engine {
namespace {

constexpr std::size_t kBudgetBytes = 4u << 20;  // per pump
constexpr std::size_t kDropBytes = 64u << 10;

bool try_again(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

}  // namespace

Link::Link(Fd fd, NodeName remote, LinkClient& client, Time now)
    : fd_(std::move(fd)),
      remote_(std::move(remote)),
      client_(client),
      last_received_(now),
      last_sent_(now) {}

// ---- in ----

Status Link::pump_in(Time now) {
  for (std::size_t total = 0; total < kBudgetBytes;) {
    // The rest of the payload and, in the same call, the next header.
    iovec parts[2];
    int count = 0;
    if (const std::size_t left = payload_left(); left > 0) {
      if (where_ != nullptr) {
        parts[count++] = {where_ + payload_done_, left};
      } else {
        dropped_.resize(kDropBytes);
        parts[count++] = {dropped_.data(), std::min(left, kDropBytes)};
      }
    }
    // The header may only follow a payload that this call can finish.
    if (count == 0 || parts[0].iov_len == payload_left()) {
      parts[count++] = {header_.data() + header_done_, kFrameBytes - header_done_};
    }
    const ssize_t result = readv(fd_.get(), parts, count);
    if (result < 0 && try_again(errno)) return success();
    if (result < 0) return system_error("receiving", errno);
    if (result == 0) return broken("the other end closed the connection");
    const auto got = static_cast<std::size_t>(result);
    const std::size_t asked = parts[0].iov_len + (count > 1 ? parts[1].iov_len : 0);
    last_received_ = now;
    total += got;
    if (Status s = consume(got); !s.ok()) return s;
    if (got < asked) return success();  // that was all there is
  }
  return success();
}

Status Link::consume(std::size_t received_bytes) {
  if (reading_) {
    const std::size_t of_payload = std::min(received_bytes, payload_left());
    payload_done_ += of_payload;
    received_bytes -= of_payload;
    client_.moved(frame_.op, 0, of_payload);
    if (payload_left() > 0) return success();
    if (Status s = end_frame(); !s.ok()) return s;
  }
  header_done_ += received_bytes;
  if (header_done_ < kFrameBytes) return success();
  return begin_frame();
}

Status Link::begin_frame() {
  header_done_ = 0;
  if (Status s = parse_frame(header_, &frame_); !s.ok()) return s;
  client_.moved(frame_.op, 0, kFrameBytes);
  where_ = nullptr;
  payload_done_ = 0;
  if (frame_.has_payload()) {
    if (Status s = client_.place(*this, frame_, &where_); !s.ok()) return s;
  }
  reading_ = frame_.length > 0;
  return reading_ ? success() : end_frame();
}

Status Link::end_frame() {
  reading_ = false;
  const bool kept = where_ != nullptr;
  if (kept && checksum64(where_, frame_.length) != frame_.checksum) {
    return broken("chunk " + std::to_string(frame_.chunk) + " of op " + to_string(frame_.op) +
                  " does not match its checksum");
  }
  where_ = nullptr;
  return client_.arrived(*this, frame_, kept);
}

// ---- out ----

Status Link::pump_out(Time now) {
  over_budget_ = false;
  for (std::size_t total = 0; total < kBudgetBytes;) {
    if (!sending_ && !take_next()) return success();
    Sending& s = *sending_;
    iovec parts[2] = {{s.header.data() + s.header_done, kFrameBytes - s.header_done},
                      {const_cast<std::uint8_t*>(s.unsent), s.unsent_bytes}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t result = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (result < 0 && try_again(errno)) return success();
    if (result < 0) return system_error("sending", errno);
    const auto sent = static_cast<std::size_t>(result);
    const std::size_t of_header = std::min(sent, kFrameBytes - s.header_done);
    s.header_done += of_header;
    s.unsent += sent - of_header;
    s.unsent_bytes -= sent - of_header;
    last_sent_ = now;
    total += sent;
    client_.moved(s.frame.op, sent, 0);
    if (s.header_done == kFrameBytes && s.unsent_bytes == 0) sending_.reset();
  }
  over_budget_ = true;
  return success();
}

bool Link::take_next() {
  Outgoing next;
  if (!queue_.empty()) {
    next.frame = queue_.front();
    queue_.pop_front();
  } else if (auto data = client_.next(*this)) {
    next = *data;
  } else {
    return false;
  }
  sending_.emplace();
  sending_->frame = next.frame;
  sending_->header = pack_frame(next.frame);
  sending_->unsent = next.payload;
  sending_->unsent_bytes = next.frame.length;
  return true;
}

void Link::release(const OpId& op) {
  if (reading_ && frame_.op == op) where_ = nullptr;
  if (!sending_ || sending_->frame.op != op || !sending_->copy.empty()) return;
  sending_->copy.assign(sending_->unsent, sending_->unsent + sending_->unsent_bytes);
  sending_->unsent = sending_->copy.data();
}

}  // namespace atoll_core::engine
