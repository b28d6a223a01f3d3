#include "engine/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>

namespace atoll_core::engine {
namespace {

constexpr int kBacklog = 512;

// A connection holds back at most so much that it cannot send yet. A slow one thus takes no chunk
// that a faster one could have had, and what is aborted is soon off the wire.
constexpr int kUnsentBytes = 64 << 10;
// A fast one needs more, or a late wake-up leaves it without.
constexpr Seconds kUnsent{0.04};

Status set_option(int fd, int level, int name, int value) {
  if (setsockopt(fd, level, name, &value, sizeof value) == 0) return success();
  return system_error("setting a socket option", errno);
}

Status set_congestion(int fd, const std::string& name) {
  if (name.empty()) return success();
  const auto size = static_cast<socklen_t>(name.size());
  if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), size) == 0) return success();
  return system_error("choosing congestion control " + name, errno);
}

std::uint16_t port_of(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return 0;
  if (storage.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<sockaddr_in6&>(storage).sin6_port);
  return ntohs(reinterpret_cast<sockaddr_in&>(storage).sin_port);
}

Status listen_at(const Address& address, Fd* out) {
  Fd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return system_error("opening a socket", errno);
  if (Status s = set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1); !s.ok()) return s;
  if (address.storage.ss_family == AF_INET6) {  // at "::" for IPv4 too, whatever the system's habit
    if (Status s = set_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0); !s.ok()) return s;
  }
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) != 0) {
    return system_error("binding the address", errno);
  }
  if (listen(fd.get(), kBacklog) != 0) return system_error("listening", errno);
  *out = std::move(fd);
  return success();
}

}  // namespace

void Fd::reset() {
  if (number_ >= 0) ::close(number_);
  number_ = -1;
}

Status resolve(const std::string& host, std::uint16_t port, bool numeric_only,
               std::vector<Address>* out) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_PASSIVE | (numeric_only ? AI_NUMERICHOST : 0);
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(),
                               &hints, &found);
  if (code != 0) {
    return {Kind::kSystem, "host \"" + host + "\": " + gai_strerror(code),
            code == EAI_SYSTEM ? errno : EADDRNOTAVAIL};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    Address address;
    std::memcpy(&address.storage, at->ai_addr, at->ai_addrlen);
    address.size = at->ai_addrlen;
    out->push_back(address);
  }
  return success();
}

std::string host_text(const Address& address) {
  char host[NI_MAXHOST];
  const auto* at = reinterpret_cast<const sockaddr*>(&address.storage);
  if (getnameinfo(at, address.size, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) return {};
  const std::string text = host;
  const std::string mapped = "::ffff:";  // IPv4 at a socket for both
  return text.starts_with(mapped) ? text.substr(mapped.size()) : text;
}

Address remote_address(int fd) {
  Address address;
  address.size = sizeof address.storage;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0)
    address.size = 0;
  return address;
}

Status listen_on(const std::string& host, std::uint16_t port, Fd* out, std::uint16_t* bound_port) {
  // Everywhere: one socket takes both families, where there are both.
  if (host.empty()) {
    const Status both = listen_on("::", port, out, bound_port);
    if (both.error_number != EAFNOSUPPORT && both.error_number != EADDRNOTAVAIL) return both;
  }
  std::vector<Address> addresses;
  if (Status s = resolve(host, port, false, &addresses); !s.ok()) return s;
  Status last = broken("no address");
  for (const Address& address : addresses) {
    last = listen_at(address, out);
    if (!last.ok()) continue;
    *bound_port = port_of(out->get());
    return last;
  }
  return last;
}

Status start_connect(const Address& address, const SocketOptions& options, Fd* out) {
  Fd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return system_error("opening a socket", errno);
  if (Status s = tune(fd.get(), options); !s.ok()) return s;
  const auto* to = reinterpret_cast<const sockaddr*>(&address.storage);
  if (connect(fd.get(), to, address.size) != 0 && errno != EINPROGRESS)
    return system_error("connecting", errno);
  *out = std::move(fd);
  return success();
}

Status connect_result(int fd) {
  int code = 0;
  socklen_t size = sizeof code;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &size) != 0) code = errno;
  return code == 0 ? success() : system_error("connecting", code);
}

Status tune(int fd, const SocketOptions& options) {
  const int silence_ms =
      static_cast<int>(std::clamp(options.silence.count() * 1000.0, 100.0, 3.6e6));
  const std::pair<int, int> numbers[] = {{TCP_NODELAY, 1},
                                         {TCP_NOTSENT_LOWAT, kUnsentBytes},
                                         {TCP_USER_TIMEOUT, silence_ms},
                                         {TCP_KEEPIDLE, 5},
                                         {TCP_KEEPINTVL, 2},
                                         {TCP_KEEPCNT, 3}};
  for (const auto& [name, value] : numbers) {
    if (Status s = set_option(fd, IPPROTO_TCP, name, value); !s.ok()) return s;
  }
  if (options.buffer_bytes > 0) {
    for (const int name : {SO_SNDBUF, SO_RCVBUF}) {
      if (Status s = set_option(fd, SOL_SOCKET, name, options.buffer_bytes); !s.ok()) return s;
    }
  }
  if (Status s = set_congestion(fd, options.congestion); !s.ok()) return s;
  return set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
}

Status check_congestion(const std::string& name) {
  if (name.empty()) return success();
  const Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return system_error("opening a socket", errno);
  const Status status = set_congestion(fd.get(), name);
  if (status.ok()) return success();
  std::string there;
  std::getline(std::ifstream("/proc/sys/net/ipv4/tcp_available_congestion_control"), there);
  return bad_argument("congestion control \"" + name + "\" is not to be had (" +
                      std::strerror(status.error_number) + "); this system has: " + there);
}

void set_pace(int fd, double bytes_per_s) {
  constexpr double kMost = 4e9;  // all bits set would mean not to spread at all
  const auto rate =
      static_cast<unsigned>(bytes_per_s > 0 ? std::clamp(bytes_per_s, 1e4, kMost) : kMost);
  (void)setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
  if (bytes_per_s <= 0) return;
  const double ahead = bytes_per_s * kUnsent.count();
  const auto unsent = static_cast<int>(std::clamp(ahead, 1.0 * kUnsentBytes, 16.0 * kUnsentBytes));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
}

Status random_bytes(std::uint8_t* out, std::size_t size) {
  if (getrandom(out, size, 0) == static_cast<ssize_t>(size)) return success();
  return system_error("asking the system for random bytes", errno);
}

}  // namespace atoll_core::engine
