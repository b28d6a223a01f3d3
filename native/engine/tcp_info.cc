#include "engine/tcp_info.h"

#include <linux/tcp.h>
#include <sys/socket.h>

#include <cstddef>

namespace atoll_core::engine {
namespace {

constexpr int kTcp = 6;  // IPPROTO_TCP, of a header that excludes <linux/tcp.h>

}  // namespace

TcpFacts tcp_facts(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd, kTcp, TCP_INFO, &info, &size) != 0) return {};
  const std::size_t needed = offsetof(tcp_info, tcpi_data_segs_out) + sizeof info.tcpi_data_segs_out;
  if (size < needed) return {};
  const bool known = info.tcpi_min_rtt != ~0u;
  // What lies behind a gap has arrived too: it would all be counted at once when the gap is closed.
  const std::uint64_t behind_gaps = std::uint64_t{info.tcpi_sacked} * info.tcpi_snd_mss;
  return {Seconds(known ? 1e-6 * info.tcpi_min_rtt : 0.0), Seconds(1e-6 * info.tcpi_rtt),
          info.tcpi_bytes_acked + behind_gaps, info.tcpi_data_segs_out, info.tcpi_total_retrans};
}

}  // namespace atoll_core::engine
