// Which pieces of an op are under way on which link: when one breaks, they must be sent again.
// Duplicates do no harm: receivers drop and ack them.
//
// Owner: a Transfer. Threads: the loop's. Failure: none; what is unknown changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "engine/link.h"
#include "engine/op.h"

namespace atoll_core::engine {

class UnderWay {
 public:
  explicit UnderWay(std::size_t num_nodes) : nodes_(num_nodes) {}

  void sent(std::uint32_t to, Piece piece, LinkId link);
  // False if it was not under way to this node, or was acked before.
  bool acked(std::uint32_t to, Piece piece);
  // What was under way to this node on the link, and is no more.
  std::vector<Piece> link_lost(std::uint32_t to, LinkId link);

 private:
  // By node, of pieces that were sent and not acked.
  std::vector<std::map<std::pair<Phase, std::uint32_t>, LinkId>> nodes_;
};

}  // namespace atoll_core::engine
