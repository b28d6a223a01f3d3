#include "engine/under_way.h"

namespace atoll_core::engine {

void UnderWay::sent(std::uint32_t to, Piece piece, LinkId link) {
  nodes_[to][{piece.phase, piece.chunk}] = link;
}

bool UnderWay::acked(std::uint32_t to, Piece piece) {
  return nodes_[to].erase({piece.phase, piece.chunk}) > 0;
}

std::vector<Piece> UnderWay::link_lost(std::uint32_t to, LinkId link) {
  std::vector<Piece> lost;
  std::erase_if(nodes_[to], [&](const auto& entry) {
    if (entry.second != link) return false;
    lost.push_back({entry.first.first, entry.first.second});
    return true;
  });
  return lost;
}

}  // namespace atoll_core::engine
