// One authenticated connection to another node: frames in, frames out. It knows framing and
// streams, and nothing of ops: where a payload goes, and what is sent next, it asks its client.
//
// Owner: Connections. Threads: the loop's. Failure: the pumps give kBroken or kSystem; then the
// owner destroys it.
//
// Payloads are read straight to where they belong and sent straight from where they lie.
// release(op) is the promise that after it neither happens any more for that op: what was sent in
// part is copied, what was read in part is dropped.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/clock.h"
#include "engine/frame.h"
#include "engine/stream.h"
#include "kernels/digest.h"

namespace atoll_core::engine {

class Link;
using LinkId = std::uint64_t;  // never used twice by an engine

struct Outgoing {
  Frame frame;
  const std::uint8_t* payload = nullptr;
};

class LinkClient {
 public:
  virtual ~LinkClient() = default;
  // A header came. `where` is where the payload belongs, or stays null: then it is dropped.
  virtual Status place(Link& link, const Frame& frame, std::uint8_t** where) = 0;
  // The whole frame is there. `kept`: its payload is in place and matches its checksum.
  virtual Status arrived(Link& link, const Frame& frame, bool kept) = 0;
  // The next payload to send, if there is one now.
  virtual std::optional<Outgoing> next(Link& link) = 0;
  virtual void moved(const OpId& op, std::size_t sent_bytes, std::size_t received_bytes) = 0;
};

class Link {
 public:
  Link(LinkId id, std::unique_ptr<Stream> stream, NodeName remote, LinkClient& client, Time now);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  LinkId id() const { return id_; }
  const NodeName& remote() const { return remote_; }
  int fd() const { return stream_->fd(); }

  // Both take what they moved from the budget, and stop when it is used up; a little more may have
  // moved by then.
  // Reads what is there.
  Status pump_in(Time now, std::int64_t& budget_bytes);
  // Sends queued frames, then payloads from the client, as far as the stream takes them.
  Status pump_out(Time now, std::int64_t& budget_bytes);
  // A frame has begun or waits.
  bool wants_to_send() const {
    return sending_.has_value() || !queue_.empty() || stream_->has_unsent();
  }
  // There may be bytes that epoll does not tell of.
  bool has_buffered() const { return stream_->has_buffered(); }

  // Frames without payload; they go before any payload that has not begun.
  void queue(const Frame& frame) { queue_.push_back(frame); }
  void release(const OpId& op);
  // What comes of this payload, which another link has brought meanwhile, is dropped.
  void drop_payload(const Frame& frame);
  // The payload that is being read; null if none is.
  const Frame* reading() const { return reading_ ? &frame_ : nullptr; }
  void say_goodbye() { stream_->say_goodbye(); }

  Time up_since() const { return up_since_; }
  Time last_received() const { return last_received_; }
  Time last_sent() const { return last_sent_; }

 private:
  struct Sending {
    Frame frame;
    FrameBytes header;
    std::size_t header_done = 0;
    const std::uint8_t* unsent = nullptr;  // of the payload
    std::size_t unsent_bytes = 0;
    std::vector<std::uint8_t> copy;  // holds what is unsent, once released
  };

  void take_next();
  Status send_some(std::int64_t budget_bytes, Stream::Moved* moved);
  void count_overhead(std::size_t at_socket, const Stream::Moved& moved);
  Status consume(std::size_t received_bytes);
  Status begin_frame();
  Status end_frame();
  std::size_t payload_left() const { return reading_ ? frame_.length - payload_done_ : 0; }

  LinkId id_;
  std::unique_ptr<Stream> stream_;
  NodeName remote_;
  LinkClient& client_;
  Time up_since_;
  Time last_received_;
  Time last_sent_;

  std::deque<Frame> queue_;
  std::optional<Sending> sending_;
  OpId last_op_;  // of what was sent

  FrameBytes header_{};
  std::size_t header_done_ = 0;
  bool reading_ = false;  // a payload
  Frame frame_;
  std::uint8_t* where_ = nullptr;
  std::size_t payload_done_ = 0;
  Checksum checksum_;  // of the payload, if it belongs somewhere
  std::int64_t overhead_bytes_ = 0;    // received and not counted for any frame
  std::vector<std::uint8_t> dropped_;  // where payloads go that belong nowhere
};

}  // namespace atoll_core::engine
