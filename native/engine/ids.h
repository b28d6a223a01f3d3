// The names of things on the wire: nodes and ops. Plain values; both are ordered as Python orders
// the tuples.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace atoll_core::engine {

// One rank of one peer. Peer ids are UTF-8; comparing bytes is comparing code points.
struct NodeName {
  std::string peer;
  std::uint32_t rank = 0;

  std::strong_ordering operator<=>(const NodeName&) const = default;
};

// One attempt to reduce one fragment: given by the coordinator, never counted here.
struct OpId {
  std::uint64_t term = 0;
  std::uint64_t round = 0;
  std::uint32_t fragment = 0;
  std::uint32_t attempt = 0;

  std::strong_ordering operator<=>(const OpId&) const = default;
};

std::string to_string(const NodeName& node);
std::string to_string(const OpId& op);

}  // namespace atoll_core::engine
