// How every call of the engine that can fail says so. There are no exceptions across its headers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace atoll_core::engine {

enum class Kind {
  kOk,
  kBadArgument,  // the caller's mistake; nothing was started
  kSystem,       // the machine said no: `error_number` is its errno
  kBroken,       // a connection is of no more use
  kRefused,      // the same, and another one would fare no better
};

struct [[nodiscard]] Status {
  Kind kind = Kind::kOk;
  std::string text;
  int error_number = 0;

  bool ok() const { return kind == Kind::kOk; }
};

inline Status success() { return {}; }
inline Status bad_argument(std::string text) { return {Kind::kBadArgument, std::move(text)}; }
inline Status broken(std::string text) { return {Kind::kBroken, std::move(text)}; }
// `doing` and what errno `error_number` means; with the limit, if too many files are open.
Status system_error(const std::string& doing, int error_number);

// How many descriptors this process may open.
std::uint64_t descriptor_limit();

}  // namespace atoll_core::engine
