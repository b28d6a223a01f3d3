// Sockets, without policy: file descriptors that close themselves, addresses, and the options that
// links need.
//
// Owner: whoever holds the Fd. Threads: any; resolve() may block for as long as the system's
// resolver does. Failure: kSystem, with the errno.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/clock.h"
#include "engine/status.h"

namespace atoll_core::engine {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int number) : number_(number) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      number_ = std::exchange(other.number_, -1);
    }
    return *this;
  }
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  void reset();

 private:
  int number_ = -1;
};

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

// The host may be a name if `numeric_only` is false.
Status resolve(const std::string& host, std::uint16_t port, bool numeric_only,
               std::vector<Address>* out);

// The host as a number. The other end's address of a connection.
std::string host_text(const Address& address);
Address remote_address(int fd);

// What a connection is tuned to. No Nagle, and dead ends are noticed: by keepalive when idle, after
// `silence` when bytes are not acknowledged or not read.
struct SocketOptions {
  Seconds silence{};
  int buffer_bytes = 0;    // 0: the system tunes them by itself, which is mostly better
  std::string congestion;  // an algorithm's name; empty: the system's
};

// Bound and listening, non-blocking; an empty host is everywhere. Port 0 lets the system choose; `port` tells which it is.
Status listen_on(const std::string& host, std::uint16_t port, Fd* out, std::uint16_t* bound_port);

// A tuned connection under way: writable once it is there or has failed (see connect_result).
Status start_connect(const Address& address, const SocketOptions& options, Fd* out);
Status connect_result(int fd);

Status tune(int fd, const SocketOptions& options);
// kBadArgument with the list of those there are, if this system has no such algorithm.
Status check_congestion(const std::string& name);

// The kernel spreads what it sends, and keeps to this rate; 0: to none. Best effort: where it
// cannot, the socket sends as before.
void set_pace(int fd, double bytes_per_s);

// Random bytes from the system.
Status random_bytes(std::uint8_t* out, std::size_t size);

}  // namespace atoll_core::engine
