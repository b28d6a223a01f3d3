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

// ---- the beginning ----

OpBook::OpBook(const Plan& plan, const Layout& layout)
    : plan_(plan), layout_(layout), ledger_(plan.nodes.size()), chunks_(plan.chunk_lanes.size()) {
  for (const std::uint32_t chunk : sending_order()) open(chunk);
}

std::vector<std::uint32_t> OpBook::sending_order() const {
  std::vector<std::uint32_t> order(chunks_.size()), turn(chunks_.size());
  std::vector<std::uint32_t> taken(plan_.lanes.size(), 0);
  for (std::uint32_t c = 0; c < order.size(); ++c) {
    order[c] = c;
    turn[c] = taken[static_cast<std::size_t>(plan_.chunk_lanes[c])]++;
  }
  std::ranges::stable_sort(order, [&](std::uint32_t one, std::uint32_t other) {
    const std::uint32_t hops = station(one).hops, other_hops = station(other).hops;
    return hops != other_hops ? hops > other_hops : turn[one] < turn[other];
  });
  return order;
}

void OpBook::open(std::uint32_t index) {
  Chunk& chunk = chunks_[index];
  const Station& here = station(index);
  chunk.arrived.assign(here.inputs.size(), false);
  chunk.acked_down.assign(here.below.size(), false);
  for (std::size_t slot = 0; slot < here.inputs.size(); ++slot) {
    const Input& input = here.inputs[slot];
    if (input.node == layout_.self) {
      chunk.arrived[slot] = true;
      continue;
    }
    ++chunk.missing;
    ++ledger_[input.node].lacking;
    if (input.leaf) ++ledger_[input.node].lacking_contributions;
  }
  open_ += chunk.missing;
  chunk.to_sum = here.is_root || here.inputs.size() > 1;
  if (chunk.to_sum) ++open_;
  if (here.parent != kNobody) {
    ++ledger_[here.parent].owed;
    ++open_;
    if (!chunk.to_sum && chunk.missing == 0) rise(index);
  }
  if (here.feeder != kNobody) {
    ++ledger_[here.feeder].lacking;
    ++open_;
  }
  for (const std::uint32_t node : here.below) ++ledger_[node].owed;
  open_ += here.below.size();
}

void OpBook::hold(std::uint32_t from, Piece piece) {
  mark_arrived(from, piece);
  ledger_[from].held.push_back(piece);
}

void OpBook::hold_finished(std::uint32_t index) {
  Chunk& chunk = chunks_[index];
  const Station& here = station(index);
  for (std::size_t slot = 0; slot < here.inputs.size(); ++slot) {
    if (!chunk.arrived[slot]) hold(here.inputs[slot].node, {Phase::kContribution, index});
  }
  summed(index);
}

std::vector<std::uint32_t> OpBook::complete_at_start() const {
  std::vector<std::uint32_t> complete;
  for (std::uint32_t c = 0; c < chunks_.size(); ++c) {
    if (chunks_[c].to_sum && chunks_[c].missing == 0) complete.push_back(c);
  }
  return complete;
}

// ---- what comes in ----

Expected OpBook::expects(std::uint32_t from, Piece piece) const {
  if (piece.chunk >= chunks_.size() || from == layout_.self) return Expected::kNever;
  const Chunk& chunk = chunks_[piece.chunk];
  if (piece.phase == Phase::kContribution) {
    const auto slot = input_slot(piece.chunk, from);
    if (!slot) return Expected::kNever;
    return chunk.arrived[*slot] ? Expected::kDuplicate : Expected::kNew;
  }
  if (station(piece.chunk).feeder != from) return Expected::kNever;
  return chunk.finished ? Expected::kDuplicate : Expected::kNew;
}

bool OpBook::received(std::uint32_t from, Piece piece) {
  mark_arrived(from, piece);
  const Chunk& chunk = chunks_[piece.chunk];
  return piece.phase == Phase::kContribution && chunk.missing == 0 && chunk.to_sum;
}

void OpBook::mark_arrived(std::uint32_t from, Piece piece) {
  Chunk& chunk = chunks_[piece.chunk];
  --open_;
  --ledger_[from].lacking;
  if (piece.phase == Phase::kFinished) {
    descend(piece.chunk);
    return;
  }
  const std::uint32_t slot = *input_slot(piece.chunk, from);
  chunk.arrived[slot] = true;
  if (station(piece.chunk).inputs[slot].leaf) --ledger_[from].lacking_contributions;
  if (--chunk.missing == 0 && !chunk.to_sum) rise(piece.chunk);
}

std::optional<std::uint32_t> OpBook::input_slot(std::uint32_t chunk, std::uint32_t node) const {
  const auto& inputs = station(chunk).inputs;
  const auto at = std::ranges::find(inputs, node, &Input::node);
  if (at == inputs.end()) return std::nullopt;
  return static_cast<std::uint32_t>(at - inputs.begin());
}

// ---- what becomes of it ----

void OpBook::summed(std::uint32_t index) {
  --open_;
  chunks_[index].to_sum = false;
  if (station(index).is_root) {
    descend(index);
  } else {
    rise(index);
  }
}

void OpBook::rise(std::uint32_t index) {
  chunks_[index].risen = true;
  offer(station(index).parent, {Phase::kContribution, index});
}

void OpBook::descend(std::uint32_t index) {
  chunks_[index].finished = true;
  for (const std::uint32_t node : station(index).below) offer(node, {Phase::kFinished, index});
}

void OpBook::offer(std::uint32_t to, Piece piece) {
  if (!awaits_ack(to, piece)) return;  // it had the piece before we did
  ++ledger_[to].ready;
  send_again(to, piece);
}

// ---- what goes out ----

void OpBook::send_again(std::uint32_t to, Piece piece) {
  Ledger& ledger = ledger_[to];
  (piece.phase == Phase::kContribution ? ledger.contributions : ledger.finished).push_back(piece);
}

std::optional<Piece> OpBook::next(std::uint32_t to) {
  for (auto* queue : {&ledger_[to].contributions, &ledger_[to].finished}) {
    while (!queue->empty()) {
      const Piece piece = queue->front();
      queue->pop_front();
      if (awaits_ack(to, piece)) return piece;
    }
  }
  return std::nullopt;
}

bool OpBook::has_next(std::uint32_t to) const {
  return !ledger_[to].contributions.empty() || !ledger_[to].finished.empty();
}

bool OpBook::awaits_ack(std::uint32_t to, Piece piece) const {
  const Chunk& chunk = chunks_[piece.chunk];
  const Station& here = station(piece.chunk);
  if (piece.phase == Phase::kContribution) return here.parent == to && !chunk.acked_up;
  const auto slot = find(here.below, to);
  return slot && !chunk.acked_down[*slot];
}

void OpBook::acked(std::uint32_t to, Piece piece) {
  if (piece.chunk >= chunks_.size() || to == layout_.self || !awaits_ack(to, piece)) return;
  Chunk& chunk = chunks_[piece.chunk];
  bool exists = chunk.risen;
  if (piece.phase == Phase::kContribution) {
    chunk.acked_up = true;
  } else {
    chunk.acked_down[*find(station(piece.chunk).below, to)] = true;
    exists = chunk.finished;
  }
  --open_;
  --ledger_[to].owed;
  if (exists) --ledger_[to].ready;
}

void OpBook::acked_all(std::uint32_t to) {
  for (std::uint32_t c = 0; c < chunks_.size() && ledger_[to].owed > 0; ++c) {
    acked(to, {Phase::kContribution, c});
    acked(to, {Phase::kFinished, c});
  }
}

// ---- where it stands ----

std::vector<std::uint32_t> OpBook::partners() const {
  std::vector<std::uint32_t> nodes;
  for (std::uint32_t node = 0; node < ledger_.size(); ++node) {
    if (needs(node) || !ledger_[node].held.empty()) nodes.push_back(node);
  }
  return nodes;
}

bool OpBook::needs(std::uint32_t node) const { return lacks_from(node) || owes(node); }

bool OpBook::lacks_from(std::uint32_t node) const { return ledger_[node].lacking > 0; }

}  // namespace atoll_core::engine
