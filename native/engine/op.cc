#include "engine/op.h"

#include <algorithm>

namespace atoll_core::engine {
namespace {

std::optional<std::uint32_t> find(const std::vector<std::uint32_t>& nodes, std::uint32_t node) {
  const auto at = std::ranges::find(nodes, node);
  if (at == nodes.end()) return std::nullopt;
  return static_cast<std::uint32_t>(at - nodes.begin());
}

}  // namespace

OpBook::OpBook(const Plan& plan, std::uint32_t self)
    : plan_(plan), self_(self), ledger_(plan.nodes.size()), chunks_(plan.chunk_lanes.size()) {
  for (std::uint32_t c = 0; c < chunks_.size(); ++c) {
    const Lane& lane = lane_of(c);
    if (lane.root == self_) {
      open_root(c, lane);
    } else {
      open_leaf(c, lane);
    }
  }
}

void OpBook::open_root(std::uint32_t index, const Lane& lane) {
  Chunk& chunk = chunks_[index];
  chunk.rooted_here = true;
  chunk.arrived.assign(lane.sources.size(), false);
  chunk.acked.assign(lane.sinks.size(), false);
  for (std::size_t slot = 0; slot < lane.sources.size(); ++slot) {
    if (lane.sources[slot] == self_) {
      chunk.arrived[slot] = true;
      continue;
    }
    ++chunk.missing;
    ++ledger_[lane.sources[slot]].lacking_contributions;
  }
  open_ += chunk.missing + 1;
  for (const std::uint32_t sink : lane.sinks) {
    if (sink == self_) continue;
    ++ledger_[sink].owed;
    ++open_;
  }
}

void OpBook::open_leaf(std::uint32_t index, const Lane& lane) {
  Chunk& chunk = chunks_[index];
  Ledger& root = ledger_[lane.root];
  chunk.acked.assign(1, true);
  if (find(lane.sources, self_)) {
    chunk.acked[0] = false;
    ++root.owed;
    ++root.ready;
    root.queue.push_back({Phase::kContribution, index});
    ++open_;
  }
  if (is_sink(lane)) {
    ++root.lacking_finished;
    ++open_;
  }
}

Expected OpBook::expects(std::uint32_t from, Piece piece) const {
  if (piece.chunk >= chunks_.size() || from == self_) return Expected::kNever;
  const Chunk& chunk = chunks_[piece.chunk];
  if (piece.phase == Phase::kContribution) {
    const auto slot = chunk.rooted_here ? source_slot(piece.chunk, from) : std::nullopt;
    if (!slot) return Expected::kNever;
    return chunk.arrived[*slot] ? Expected::kDuplicate : Expected::kNew;
  }
  const Lane& lane = lane_of(piece.chunk);
  if (chunk.rooted_here || lane.root != from || !is_sink(lane)) return Expected::kNever;
  return chunk.finished ? Expected::kDuplicate : Expected::kNew;
}

bool OpBook::received(std::uint32_t from, Piece piece) {
  Chunk& chunk = chunks_[piece.chunk];
  --open_;
  if (piece.phase == Phase::kFinished) {
    chunk.finished = true;
    --ledger_[from].lacking_finished;
    return false;
  }
  chunk.arrived[*source_slot(piece.chunk, from)] = true;
  --ledger_[from].lacking_contributions;
  return --chunk.missing == 0;
}

std::optional<std::uint32_t> OpBook::source_slot(std::uint32_t chunk, std::uint32_t node) const {
  return find(lane_of(chunk).sources, node);
}

std::vector<std::uint32_t> OpBook::complete_at_start() const {
  std::vector<std::uint32_t> complete;
  for (std::uint32_t c = 0; c < chunks_.size(); ++c) {
    if (chunks_[c].rooted_here && chunks_[c].missing == 0) complete.push_back(c);
  }
  return complete;
}

void OpBook::summed(std::uint32_t chunk) {
  chunks_[chunk].finished = true;
  --open_;
  for (const std::uint32_t sink : lane_of(chunk).sinks) {
    if (sink == self_) continue;
    ++ledger_[sink].ready;
    ledger_[sink].queue.push_back({Phase::kFinished, chunk});
  }
}

std::optional<Piece> OpBook::next(std::uint32_t to) {
  auto& queue = ledger_[to].queue;
  if (queue.empty()) return std::nullopt;
  const Piece piece = queue.front();
  queue.pop_front();
  return piece;
}

void OpBook::acked(std::uint32_t to, Piece piece) {
  if (piece.chunk >= chunks_.size() || to == self_) return;
  Chunk& chunk = chunks_[piece.chunk];
  const Lane& lane = lane_of(piece.chunk);
  std::optional<std::uint32_t> slot;
  if (piece.phase == Phase::kFinished && chunk.finished && chunk.rooted_here)
    slot = find(lane.sinks, to);
  if (piece.phase == Phase::kContribution && !chunk.rooted_here && lane.root == to) slot = 0;
  if (!slot || chunk.acked[*slot]) return;
  chunk.acked[*slot] = true;
  --ledger_[to].owed;
  --ledger_[to].ready;
  --open_;
}

std::vector<std::uint32_t> OpBook::partners() const {
  std::vector<std::uint32_t> nodes;
  for (std::uint32_t node = 0; node < ledger_.size(); ++node) {
    if (needs(node)) nodes.push_back(node);
  }
  return nodes;
}

bool OpBook::needs(std::uint32_t node) const { return lacks_from(node) || owes(node); }

bool OpBook::lacks_from(std::uint32_t node) const {
  return ledger_[node].lacking_contributions + ledger_[node].lacking_finished > 0;
}

const Lane& OpBook::lane_of(std::uint32_t chunk) const {
  return plan_.lanes[static_cast<std::size_t>(plan_.chunk_lanes[chunk])];
}

bool OpBook::is_sink(const Lane& lane) const { return find(lane.sinks, self_).has_value(); }

}  // namespace atoll_core::engine
