// One authenticated connection to another node: frames in, frames out. It knows framing and
// sockets, and nothing of ops: where a payload goes, and what is sent next, it asks its client.
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
#include <optional>
#include <vector>

#include "engine/clock.h"
#include "engine/frame.h"
#include "engine/socket.h"

namespace atoll_core::engine {

class Link;

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
  Link(Fd fd, NodeName remote, LinkClient& client, Time now);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const NodeName& remote() const { return remote_; }
  int fd() const { return fd_.get(); }

  // Reads what is there, up to a budget that keeps the other links from waiting.
  Status pump_in(Time now);
  // Sends queued frames, then payloads from the client, as far as the socket takes them and the
  // budget goes.
  Status pump_out(Time now);
  // There is more to send than the last pump_out could.
  bool wants_to_send() const { return over_budget_ || sending_.has_value() || !queue_.empty(); }

  // Frames without payload; they go before any payload that has not begun.
  void queue(const Frame& frame) { queue_.push_back(frame); }
  void release(const OpId& op);

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

  bool take_next();
  Status consume(std::size_t received_bytes);
  Status begin_frame();
  Status end_frame();
  std::size_t payload_left() const { return reading_ ? frame_.length - payload_done_ : 0; }

  Fd fd_;
  NodeName remote_;
  LinkClient& client_;
  Time last_received_;
  Time last_sent_;

  std::deque<Frame> queue_;
  std::optional<Sending> sending_;
  bool over_budget_ = false;

  FrameBytes header_{};
  std::size_t header_done_ = 0;
  bool reading_ = false;  // a payload
  Frame frame_;
  std::uint8_t* where_ = nullptr;
  std::size_t payload_done_ = 0;
  std::vector<std::uint8_t> dropped_;  // where payloads go that belong nowhere
};

}  // namespace atoll_core::engine
