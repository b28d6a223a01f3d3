#include "engine/ids.h"

#include <cstring>

#include "engine/status.h"

namespace atoll_core::engine {

std::string to_string(const NodeName& node) { return node.peer + "." + std::to_string(node.rank); }

std::string to_string(const OpId& op) {
  std::string text = std::to_string(op.term);
  text.insert(text.begin(), 't');
  text.append("/r").append(std::to_string(op.round));
  text.append("/f").append(std::to_string(op.fragment));
  text.append("/a").append(std::to_string(op.attempt));
  return text;
}

Status system_error(const std::string& doing, int error_number) {
  return {Kind::kSystem, doing + ": " + std::strerror(error_number), error_number};
}

}  // namespace atoll_core::engine
