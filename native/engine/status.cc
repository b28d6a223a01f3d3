#include "engine/status.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace atoll_core::engine {

std::uint64_t descriptor_limit() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

Status system_error(const std::string& doing, int error_number) {
  std::string text = doing + ": " + std::strerror(error_number);
  if (error_number == EMFILE) {
    text +=
        " (this process may open " + std::to_string(descriptor_limit()) + "; ulimit -n says more)";
  }
  return {Kind::kSystem, std::move(text), error_number};
}

}  // namespace atoll_core::engine
