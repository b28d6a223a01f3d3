#include "engine/transfer.h"

#include <utility>

#include "kernels/digest.h"

namespace atoll_core::engine {

// ---- the beginning ----

Transfer::Transfer(Plan plan, Layout layout, Buffers buffers, Seconds deadline,
                   std::shared_ptr<Kept> kept, Slab slab, Time now)
    : started_at(now),
      expires_at(now + to_duration(deadline)),
      under_way(plan.nodes.size()),
      rates(plan.nodes.size()),
      plan_(std::move(plan)),
      layout_(std::move(layout)),
      buffers_(buffers),
      book_(plan_, layout_),
      acquaintances_(plan_.nodes.size()),
      kept_(std::move(kept)),
      places_(plan_.chunk_lanes.size()),
      found_(plan_.chunk_lanes.size()),
      means_(plan_.chunk_lanes.size(), nullptr),
      checksums_(plan_.chunk_lanes.size(), 0),
      slab_(std::move(slab)) {
  for (std::uint32_t i = 0; i < plan_.nodes.size(); ++i) index_[plan_.nodes[i].name] = i;
  kept_->use_grid(layout_.grid_key);
  find_kept();
  lay_out();
}

void Transfer::find_kept() {
  for (std::uint32_t c = 0; c < places_.size(); ++c) {
    const Station& here = book_.station(c);
    places_[c].assign(here.inputs.size(), nullptr);
    found_[c].assign(here.inputs.size(), false);
    for (std::size_t slot = 0; slot < here.inputs.size(); ++slot) {
      const Input& input = here.inputs[slot];
      if (input.node == layout_.self || input.key == 0) continue;
      const std::uint8_t* bytes = kept_->find(input.key, range(c), plan_);
      if (bytes == nullptr) continue;
      places_[c][slot] = const_cast<std::uint8_t*>(bytes);  // read only from here on
      found_[c][slot] = true;
      book_.hold(input.node, {Phase::kContribution, c});
    }
    const bool finished =
        here.finished_key != 0 &&
        kept_->is_finished(here.finished_key, range(c), buffers_.result + layout_.buffer_offsets[c],
                           layout_.chunk_bytes(c), &checksums_[c]);
    if (finished && here.is_root) {
      book_.hold_finished(c);
    } else if (finished && here.feeder != kNobody) {
      book_.hold(here.feeder, {Phase::kFinished, c});
    }
  }
}

void Transfer::lay_out() {
  const auto each = [&](const auto& give) {
    for (std::uint32_t c = 0; c < places_.size(); ++c) {
      const Station& here = book_.station(c);
      for (std::size_t slot = 0; slot < here.inputs.size(); ++slot) {
        if (here.inputs[slot].node != layout_.self && !found_[c][slot]) give(c, places_[c][slot]);
      }
      if (!here.is_root && here.inputs.size() > 1) give(c, means_[c]);
    }
  };
  std::size_t size = 0;
  each([&](std::uint32_t chunk, std::uint8_t*) { size += layout_.chunk_bytes(chunk); });
  slab_.ensure(size);
  std::uint8_t* at = slab_.bytes.get();
  each([&](std::uint32_t chunk, std::uint8_t*& place) {
    place = at;
    at += layout_.chunk_bytes(chunk);
  });
}

std::optional<std::uint32_t> Transfer::index_of(const NodeName& node) const {
  const auto at = index_.find(node);
  if (at == index_.end()) return std::nullopt;
  return at->second;
}

// ---- bytes ----

std::uint8_t* Transfer::place(std::uint32_t from, Piece piece) {
  if (piece.phase == Phase::kFinished) return buffers_.result + layout_.buffer_offsets[piece.chunk];
  return places_[piece.chunk][*book_.input_slot(piece.chunk, from)];
}

bool Transfer::received(std::uint32_t from, Piece piece, std::uint64_t checksum) {
  if (piece.phase == Phase::kFinished) checksums_[piece.chunk] = checksum;
  return book_.received(from, piece);
}

const std::uint8_t* Transfer::input(std::uint32_t chunk, std::size_t slot) const {
  const bool own = book_.station(chunk).inputs[slot].node == layout_.self;
  return own ? buffers_.contribution + layout_.buffer_offsets[chunk] : places_[chunk][slot];
}

const std::uint8_t* Transfer::bytes_of(Piece piece) const {
  if (piece.phase == Phase::kFinished) return buffers_.result + layout_.buffer_offsets[piece.chunk];
  return means_[piece.chunk] != nullptr ? means_[piece.chunk] : input(piece.chunk, 0);
}

std::uint64_t Transfer::checksum_of(Piece piece) const {
  if (piece.phase == Phase::kFinished) return checksums_[piece.chunk];
  return checksum64(bytes_of(piece), layout_.chunk_bytes(piece.chunk));
}

// ---- sums ----

Sum Transfer::sum(std::uint32_t chunk) {
  const Time begin = Clock::now();
  const Station& here = book_.station(chunk);
  std::vector<const std::uint8_t*> contributions;
  std::vector<std::uint64_t> weights;
  for (std::size_t slot = 0; slot < here.inputs.size(); ++slot) {
    contributions.push_back(input(chunk, slot));
    weights.push_back(here.inputs[slot].weight);
  }
  std::uint8_t* out = here.is_root ? buffers_.result + layout_.buffer_offsets[chunk] : means_[chunk];
  Sum sum;
  Checksum checksum(out);
  sum.finite = reduce_range(plan_.codec, plan_.boundaries, plan_.chunk_starts[chunk],
                            plan_.chunk_starts[chunk + 1], contributions, weights, out,
                            here.is_root ? &checksum : nullptr);
  if (here.is_root) sum.checksum = checksum.finish(layout_.chunk_bytes(chunk));
  sum.seconds = Seconds(Clock::now() - begin).count();
  return sum;
}

void Transfer::summed(std::uint32_t chunk, const Sum& sum) {
  checksums_[chunk] = sum.checksum;
  book_.summed(chunk);
}

// ---- the end ----

void Transfer::leave_to_next_attempt() {
  for (std::uint32_t c = 0; c < places_.size(); ++c) {
    const Station& here = book_.station(c);
    for (std::size_t slot = 0; slot < here.inputs.size(); ++slot) {
      const Input& input = here.inputs[slot];
      const bool came = input.node != layout_.self && !found_[c][slot] && book_.has(c, slot);
      if (came && input.key != 0) kept_->add(input.key, range(c), places_[c][slot]);
    }
    if (here.finished_key != 0 && book_.has_finished(c)) {
      kept_->add_finished(here.finished_key, range(c), buffers_.result + layout_.buffer_offsets[c],
                          checksums_[c]);
    }
  }
  kept_->hold(std::move(slab_));
}

}  // namespace atoll_core::engine
