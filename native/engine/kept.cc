#include "engine/kept.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "kernels/codec.h"
#include "kernels/digest.h"

namespace atoll_core::engine {
namespace {

constexpr std::align_val_t kPage{2u << 20};

}  // namespace

void Slab::Free::operator()(std::uint8_t* bytes) const { ::operator delete[](bytes, kPage); }

// In large pages where the system has such: it finds each of them by one entry instead of 512.
void Slab::ensure(std::size_t wanted) {
  if (wanted <= size) return;
  bytes.reset();
  bytes.reset(new (kPage) std::uint8_t[wanted]);
  size = wanted;
  (void)madvise(bytes.get(), size, MADV_HUGEPAGE);
}

void Kept::use_grid(std::uint64_t grid_key) {
  if (grid_key != grid_key_) forget();
  grid_key_ = grid_key;
}

void Kept::forget() {
  received_.clear();
  finished_.clear();
  slabs_.clear();
}

void Kept::add(ContentKey key, ElementRange range, const std::uint8_t* bytes) {
  Run& run = received_[{key, range.start}];
  if (run.stop < range.stop) run = {range.stop, bytes, 0};
}

const std::uint8_t* Kept::find(ContentKey key, ElementRange range, const Plan& plan) const {
  auto at = received_.upper_bound({key, range.start});
  if (at == received_.begin()) return nullptr;
  --at;
  const auto& [name, run] = *at;
  if (name.first != key || run.stop < range.stop) return nullptr;
  return run.bytes + range_bytes(plan.codec, plan.boundaries, name.second, range.start);
}

void Kept::add_finished(ContentKey key, ElementRange range, const std::uint8_t* bytes,
                        std::uint64_t checksum) {
  finished_[{key, range.start}] = {range.stop, bytes, checksum};
}

bool Kept::is_finished(ContentKey key, ElementRange range, const std::uint8_t* bytes,
                       std::size_t size, std::uint64_t* checksum) const {
  const auto at = finished_.find({key, range.start});
  if (at == finished_.end() || at->second.stop != range.stop || at->second.bytes != bytes ||
      checksum64(bytes, size) != at->second.checksum) {
    return false;
  }
  *checksum = at->second.checksum;
  return true;
}

void Kept::hold(Slab slab) {
  if (slab.size > 0) slabs_.push_back(std::move(slab));
}

Slab Kept::take_slab() {
  Slab largest;
  const auto at = std::ranges::max_element(slabs_, {}, &Slab::size);
  if (at != slabs_.end()) largest = std::move(*at);
  forget();
  return largest;
}

}  // namespace atoll_core::engine
