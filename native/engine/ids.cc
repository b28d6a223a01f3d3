#include "engine/ids.h"

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

}  // namespace atoll_core::engine
