#include "engine/stream.h"

#include <cerrno>

namespace atoll_core::engine {
namespace {

bool try_again(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

std::size_t total(std::span<const iovec> parts) {
  std::size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

class PlainStream final : public Stream {
 public:
  using Stream::Stream;

  Status handshake(bool* done) override {
    *done = true;
    return success();
  }
  Status read(std::span<const iovec> parts, Moved* moved) override {
    const Status status = receive(parts, &moved->bytes);
    moved->more = moved->bytes == total(parts);
    return status;
  }
  Status write(std::span<const iovec> parts, Moved* moved) override {
    const Status status = send(parts, &moved->bytes);
    moved->more = moved->bytes == total(parts);
    return status;
  }
  Status flush() override { return success(); }
  bool has_unsent() const override { return false; }
  bool has_buffered() const override { return false; }
  void say_goodbye() override {}
};

}  // namespace

Status Stream::receive(std::span<const iovec> parts, std::size_t* bytes) {
  *bytes = 0;
  const ssize_t got = readv(fd_.get(), parts.data(), static_cast<int>(parts.size()));
  if (got < 0 && try_again(errno)) return success();
  if (got < 0) return system_error("receiving", errno);
  if (got == 0) return broken("the other end closed the connection");
  *bytes = static_cast<std::size_t>(got);
  received_bytes_ += *bytes;
  return success();
}

Status Stream::send(std::span<const iovec> parts, std::size_t* bytes) {
  *bytes = 0;
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && try_again(errno)) return success();
  if (sent < 0) return system_error("sending", errno);
  *bytes = static_cast<std::size_t>(sent);
  sent_bytes_ += *bytes;
  return success();
}

std::unique_ptr<Stream> plain_stream(Fd fd) { return std::make_unique<PlainStream>(std::move(fd)); }

}  // namespace atoll_core::engine
