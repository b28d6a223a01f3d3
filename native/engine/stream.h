// What the bytes of a connection pass through: a TCP socket as it is, or TLS over it. Hello and
// link read and write streams and know no more.
//
// Owner: a pending hello, then a Link. Threads: the loop's; nothing blocks. Failure: kBroken or
// kSystem, and the stream is of no more use; the owner destroys it.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "engine/socket.h"
#include "engine/status.h"

namespace atoll_core::engine {

class Stream {
 public:
  // What one call moved. `more`: another call may move more at once; else wait for the socket.
  struct Moved {
    std::size_t bytes = 0;
    bool more = false;
  };

  explicit Stream(Fd fd) : fd_(std::move(fd)) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Before anything else, until `done`: both ends agree on how to go on.
  virtual Status handshake(bool* done) = 0;
  virtual Status read(std::span<const iovec> parts, Moved* moved) = 0;
  // What was taken is not always at the socket yet: see has_unsent().
  virtual Status write(std::span<const iovec> parts, Moved* moved) = 0;
  // Sends what was taken, as far as the socket has room.
  virtual Status flush() = 0;
  virtual bool has_unsent() const = 0;
  // Bytes may be had from read() of which epoll will not tell.
  virtual bool has_buffered() const = 0;
  // Whether the other end may call itself so, once the handshake is done. Without certificates
  // anybody may: the hello's proof has to do.
  virtual bool speaks_for(const std::string&) const { return true; }
  // Tells the other end that nothing more comes, if the socket has room.
  virtual void say_goodbye() = 0;

  int fd() const { return fd_.get(); }
  // At the socket.
  std::uint64_t sent_bytes() const { return sent_bytes_; }
  std::uint64_t received_bytes() const { return received_bytes_; }

 protected:
  // One call to the socket; nothing moved: not now. kBroken at the end of what comes.
  Status receive(std::span<const iovec> parts, std::size_t* bytes);
  Status send(std::span<const iovec> parts, std::size_t* bytes);

 private:
  Fd fd_;
  std::uint64_t sent_bytes_ = 0;
  std::uint64_t received_bytes_ = 0;
};

std::unique_ptr<Stream> plain_stream(Fd fd);

}  // namespace atoll_core::engine
