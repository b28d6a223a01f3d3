// What the attempts of one round have left on this node: bytes that need not come again.
//
// Bytes are found by their content's key and a range of elements, and only for the grid they were
// encoded on. Received bytes lie in slabs that live here. Finished chunks lie in the caller's
// result, which is the caller's between attempts: they count only while their checksum fits.
//
// Owner: Transfers, shared with the transfers of the round. Threads: the loop's. Failure: none;
// what is not found has to be sent again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/plan.h"

namespace atoll_core::engine {

// A block of memory, not cleared. Spares one allocation and its page faults per op.
struct Slab {
  struct Free {
    void operator()(std::uint8_t* bytes) const;
  };
  std::unique_ptr<std::uint8_t[], Free> bytes;
  std::size_t size = 0;

  void ensure(std::size_t wanted);
};

struct ElementRange {
  std::int64_t start = 0;
  std::int64_t stop = 0;
};

class Kept {
 public:
  // For another grid than before everything is forgotten.
  void use_grid(std::uint64_t grid_key);

  // `bytes` lie in a slab that is, or will be, given to hold().
  void add(ContentKey key, ElementRange range, const std::uint8_t* bytes);
  // Bytes of just this range, perhaps out of a larger one; null if there are none.
  const std::uint8_t* find(ContentKey key, ElementRange range, const Plan& plan) const;

  void add_finished(ContentKey key, ElementRange range, const std::uint8_t* bytes,
                    std::uint64_t checksum);
  // Whether `bytes` still are that finished chunk, of `size` bytes; then `checksum` is theirs.
  bool is_finished(ContentKey key, ElementRange range, const std::uint8_t* bytes, std::size_t size,
                   std::uint64_t* checksum) const;

  void hold(Slab slab);
  // The largest slab; what lay in it is forgotten with everything else.
  Slab take_slab();

 private:
  struct Run {
    std::int64_t stop = 0;
    const std::uint8_t* bytes = nullptr;
    std::uint64_t checksum = 0;  // of finished chunks
  };
  using Runs = std::map<std::pair<ContentKey, std::int64_t>, Run>;  // by key and first element

  void forget();

  std::uint64_t grid_key_ = 0;
  Runs received_;
  Runs finished_;
  std::vector<Slab> slabs_;
};

}  // namespace atoll_core::engine
