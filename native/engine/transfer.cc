#include "engine/transfer.h"

#include <utility>

#include "kernels/digest.h"

namespace atoll_core::engine {

void Slab::ensure(std::size_t wanted) {
  if (wanted <= size) return;
  bytes.reset();
  bytes = std::make_unique_for_overwrite<std::uint8_t[]>(wanted);
  size = wanted;
}

Transfer::Transfer(Plan plan, Layout layout, Buffers buffers, Seconds deadline, Slab slab, Time now)
    : started_at(now),
      expires_at(now + to_duration(deadline)),
      plan_(std::move(plan)),
      layout_(std::move(layout)),
      buffers_(buffers),
      book_(plan_, layout_.self),
      begun_(plan_.nodes.size(), false),
      checksums_(plan_.chunk_lanes.size(), 0),
      slab_(std::move(slab)) {
  for (std::uint32_t i = 0; i < plan_.nodes.size(); ++i) index_[plan_.nodes[i].name] = i;
  std::size_t size = 0;
  slots_.reserve(checksums_.size());
  for (std::uint32_t c = 0; c < checksums_.size(); ++c) {
    slots_.push_back(size);
    if (lane_of(c).root != layout_.self) continue;
    const std::size_t own = book_.source_slot(c, layout_.self) ? 1 : 0;
    size += (lane_of(c).sources.size() - own) * layout_.chunk_bytes(c);
  }
  slab_.ensure(size);
}

std::optional<std::uint32_t> Transfer::index_of(const NodeName& node) const {
  const auto at = index_.find(node);
  if (at == index_.end()) return std::nullopt;
  return at->second;
}

const Lane& Transfer::lane_of(std::uint32_t chunk) const {
  return plan_.lanes[static_cast<std::size_t>(plan_.chunk_lanes[chunk])];
}

std::uint8_t* Transfer::contributed(std::uint32_t chunk, std::size_t slot) const {
  const auto own =
      book_.source_slot(chunk, layout_.self);  // takes no room: it lies in the caller's buffer
  const std::size_t before = own && *own < slot ? slot - 1 : slot;
  return slab_.bytes.get() + slots_[chunk] + before * layout_.chunk_bytes(chunk);
}

std::uint8_t* Transfer::place(std::uint32_t from, Piece piece) {
  if (piece.phase == Phase::kFinished) return buffers_.result + layout_.offsets[piece.chunk];
  return contributed(piece.chunk, *book_.source_slot(piece.chunk, from));
}

const std::uint8_t* Transfer::bytes_of(Piece piece) const {
  const std::uint8_t* base =
      piece.phase == Phase::kFinished ? buffers_.result : buffers_.contribution;
  return base + layout_.offsets[piece.chunk];
}

std::uint64_t Transfer::checksum_of(Piece piece) const {
  if (piece.phase == Phase::kFinished) return checksums_[piece.chunk];
  return checksum64(bytes_of(piece), layout_.chunk_bytes(piece.chunk));
}

Sum Transfer::sum(std::uint32_t chunk) {
  const Time begin = Clock::now();
  const Lane& lane = lane_of(chunk);
  std::vector<const std::uint8_t*> contributions;
  for (std::size_t slot = 0; slot < lane.sources.size(); ++slot) {
    contributions.push_back(lane.sources[slot] == layout_.self
                                ? bytes_of({Phase::kContribution, chunk})
                                : contributed(chunk, slot));
  }
  std::uint8_t* out = buffers_.result + layout_.offsets[chunk];
  Sum sum;
  sum.finite = reduce_range(plan_.codec, plan_.boundaries, plan_.chunk_starts[chunk],
                            plan_.chunk_starts[chunk + 1], contributions, lane.weights, out);
  sum.checksum = checksum64(out, layout_.chunk_bytes(chunk));
  sum.seconds = Seconds(Clock::now() - begin).count();
  return sum;
}

void Transfer::summed(std::uint32_t chunk, const Sum& sum) {
  checksums_[chunk] = sum.checksum;
  book_.summed(chunk);
}

}  // namespace atoll_core::engine
