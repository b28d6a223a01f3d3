#include "engine/link.h"

#include <algorithm>
#include <utility>

namespace atoll_core::engine {
namespace {

constexpr std::size_t kDropBytes = 64u << 10;

// How much of so many bytes a budget above 0 allows at once.
std::size_t within(std::int64_t budget_bytes, std::size_t bytes) {
  return std::min(bytes, static_cast<std::size_t>(budget_bytes));
}

}  // namespace

Link::Link(LinkId id, std::unique_ptr<Stream> stream, NodeName remote, LinkClient& client, Time now)
    : id_(id),
      stream_(std::move(stream)),
      remote_(std::move(remote)),
      client_(client),
      up_since_(now),
      last_received_(now),
      last_sent_(now) {}

// ---- in ----

Status Link::pump_in(Time now, std::int64_t& budget_bytes) {
  while (budget_bytes > 0) {
    // The rest of the payload and, in the same call, the next header.
    iovec parts[2];
    std::size_t count = 0;
    if (const std::size_t left = payload_left(); left > 0) {
      if (where_ != nullptr) {
        parts[count++] = {where_ + payload_done_, within(budget_bytes, left)};
      } else {
        dropped_.resize(kDropBytes);
        parts[count++] = {dropped_.data(), within(budget_bytes, std::min(left, kDropBytes))};
      }
    }
    // The header may only follow a payload that this call can finish.
    if (count == 0 || parts[0].iov_len == payload_left()) {
      parts[count++] = {header_.data() + header_done_, kFrameBytes - header_done_};
    }
    const std::uint64_t before = stream_->received_bytes();
    Stream::Moved moved;
    const Status status = stream_->read({parts, count}, &moved);
    const auto at_socket = static_cast<std::size_t>(stream_->received_bytes() - before);
    if (at_socket > 0) last_received_ = now;
    budget_bytes -= static_cast<std::int64_t>(at_socket);
    count_overhead(at_socket, moved);
    if (!status.ok()) return status;
    if (Status s = consume(moved.bytes); !s.ok()) return s;
    if (!moved.more) return success();
  }
  return success();
}

// What TLS adds: known once all that was taken from the socket has been given.
void Link::count_overhead(std::size_t at_socket, const Stream::Moved& moved) {
  overhead_bytes_ += static_cast<std::int64_t>(at_socket) - static_cast<std::int64_t>(moved.bytes);
  if (moved.more || overhead_bytes_ <= 0) return;
  client_.moved(frame_.op, 0, static_cast<std::size_t>(overhead_bytes_));
  overhead_bytes_ = 0;
}

Status Link::consume(std::size_t received_bytes) {
  if (received_bytes == 0) return success();
  if (reading_) {
    const std::size_t of_payload = std::min(received_bytes, payload_left());
    payload_done_ += of_payload;
    received_bytes -= of_payload;
    if (where_ != nullptr) checksum_.advance(payload_done_);
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
  checksum_ = Checksum(where_);
  reading_ = frame_.length > 0;
  return reading_ ? success() : end_frame();
}

Status Link::end_frame() {
  reading_ = false;
  const bool kept = where_ != nullptr;
  if (kept && checksum_.finish(frame_.length) != frame_.checksum) {
    return broken("chunk " + std::to_string(frame_.chunk) + " of op " + to_string(frame_.op) +
                  " does not match its checksum");
  }
  where_ = nullptr;
  return client_.arrived(*this, frame_, kept);
}

void Link::drop_payload(const Frame& frame) {
  if (reading_ && frame_.op == frame.op && frame_.type == frame.type && frame_.chunk == frame.chunk)
    where_ = nullptr;
}

// ---- out ----

Status Link::pump_out(Time now, std::int64_t& budget_bytes) {
  while (budget_bytes > 0) {
    if (!sending_) take_next();
    const std::uint64_t before = stream_->sent_bytes();
    Stream::Moved moved;
    const Status status = sending_ ? send_some(budget_bytes, &moved) : stream_->flush();
    const auto at_socket = static_cast<std::size_t>(stream_->sent_bytes() - before);
    if (at_socket > 0) last_sent_ = now;
    budget_bytes -= static_cast<std::int64_t>(at_socket);
    client_.moved(last_op_, at_socket, 0);
    if (!status.ok() || !moved.more) return status;
  }
  return success();
}

Status Link::send_some(std::int64_t budget_bytes, Stream::Moved* moved) {
  Sending& s = *sending_;
  const iovec parts[2] = {
      {s.header.data() + s.header_done, kFrameBytes - s.header_done},
      {const_cast<std::uint8_t*>(s.unsent), within(budget_bytes, s.unsent_bytes)}};
  if (Status status = stream_->write(parts, moved); !status.ok()) return status;
  const std::size_t of_header = std::min(moved->bytes, kFrameBytes - s.header_done);
  s.header_done += of_header;
  s.unsent += moved->bytes - of_header;
  s.unsent_bytes -= moved->bytes - of_header;
  if (s.header_done == kFrameBytes && s.unsent_bytes == 0) sending_.reset();
  return success();
}

void Link::take_next() {
  Outgoing next;
  if (!queue_.empty()) {
    next.frame = queue_.front();
    queue_.pop_front();
  } else if (auto data = client_.next(*this)) {
    next = *data;
  } else {
    return;
  }
  last_op_ = next.frame.op;
  sending_.emplace();
  sending_->frame = next.frame;
  sending_->header = pack_frame(next.frame);
  sending_->unsent = next.payload;
  sending_->unsent_bytes = next.frame.length;
}

void Link::release(const OpId& op) {
  if (reading_ && frame_.op == op) where_ = nullptr;
  if (!sending_ || sending_->frame.op != op || !sending_->copy.empty()) return;
  sending_->copy.assign(sending_->unsent, sending_->unsent + sending_->unsent_bytes);
  sending_->unsent = sending_->copy.data();
}

}  // namespace atoll_core::engine
