// Sealed bytes between records and the socket: appended at the end, taken at the front.
//
// Owner: a TlsStream, one for each direction. Threads: the loop's.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace atoll_core::engine {

class TlsBuffer {
 public:
  explicit TlsBuffer(std::size_t bytes) : bytes_(bytes) {}

  std::span<std::uint8_t> room() {
    if (begin_ > 0) {
      std::memmove(bytes_.data(), bytes_.data() + begin_, end_ - begin_);
      end_ -= std::exchange(begin_, 0);
    }
    return {bytes_.data() + end_, bytes_.size() - end_};
  }
  // So much was put into the room.
  void added(std::size_t bytes) { end_ += bytes; }
  void append(const void* from, std::size_t bytes) {
    if (room().size() < bytes) bytes_.resize(end_ + bytes);
    std::memcpy(bytes_.data() + end_, from, bytes);
    end_ += bytes;
  }

  std::span<const std::uint8_t> held() const { return {bytes_.data() + begin_, end_ - begin_}; }
  bool empty() const { return begin_ == end_; }
  void taken(std::size_t bytes) { begin_ += bytes; }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace atoll_core::engine
