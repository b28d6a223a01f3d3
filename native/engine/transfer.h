// One op under way: its plan and books, the caller's buffers, memory for what others send, its
// deadlines.
//
// Owner: Transfers. Threads: the loop's, except sum(), which the pool runs while the loop keeps the
// Transfer alive. Failure: none; a sum that is not finite says so.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/clock.h"
#include "engine/frame.h"
#include "engine/kept.h"
#include "engine/op.h"
#include "engine/plan.h"
#include "engine/rates.h"
#include "engine/registry.h"
#include "engine/under_way.h"

namespace atoll_core::engine {

// The caller's memory: this engine's until the op's report has been given.
struct Buffers {
  const std::uint8_t* contribution = nullptr;  // null if this node does not contribute
  std::uint8_t* result = nullptr;
};

struct Sum {
  bool finite = false;
  std::uint64_t checksum = 0;  // of the bytes that were made
  double seconds = 0.0;
};

// How far two nodes have come in telling each other that an op has begun.
struct Acquaintance {
  bool credit = false;  // the other has begun, under the same plan, and takes our data
  bool told = false;    // it knows what we hold already, and may send the rest
};

class Transfer {
 public:
  // `kept` is what earlier attempts of the round left; it may be empty.
  Transfer(Plan plan, Layout layout, Buffers buffers, Seconds deadline, std::shared_ptr<Kept> kept,
           Slab slab, Time now);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  const Plan& plan() const { return plan_; }
  const Layout& layout() const { return layout_; }
  const OpId& op() const { return plan_.op; }
  OpBook& book() { return book_; }
  const NodeName& name(std::uint32_t node) const { return plan_.nodes[node].name; }
  std::optional<std::uint32_t> index_of(const NodeName& node) const;

  // Where a piece from `from` belongs. It must be expected.
  std::uint8_t* place(std::uint32_t from, Piece piece);
  // It is there. True if its chunk is to be summed now.
  bool received(std::uint32_t from, Piece piece, std::uint64_t checksum);
  // What is sent for a piece of this node.
  const std::uint8_t* bytes_of(Piece piece) const;
  std::uint64_t checksum_of(Piece piece) const;

  // Adds up a chunk's inputs, divides and encodes: into the result at the root, else into memory of
  // its own. On the pool.
  Sum sum(std::uint32_t chunk);
  void summed(std::uint32_t chunk, const Sum& sum);

  Acquaintance& with(std::uint32_t node) { return acquaintances_[node]; }

  // When nothing touches the buffers any more: hands on what a further attempt can use.
  void leave_to_next_attempt();

  Time started_at;
  Time expires_at;
  std::atomic<bool> cancelled{false};  // sums that have not begun need not
  unsigned sums_under_way = 0;
  Report report;  // filled as the op goes on
  UnderWay under_way;
  Rates rates;

 private:
  ElementRange range(std::uint32_t chunk) const {
    return {plan_.chunk_starts[chunk], plan_.chunk_starts[chunk + 1]};
  }
  void find_kept();
  void lay_out();
  // Where an input's bytes lie.
  const std::uint8_t* input(std::uint32_t chunk, std::size_t slot) const;

  Plan plan_;
  Layout layout_;
  Buffers buffers_;
  OpBook book_;
  std::map<NodeName, std::uint32_t> index_;
  std::vector<Acquaintance> acquaintances_;
  std::shared_ptr<Kept> kept_;
  std::vector<std::vector<std::uint8_t*>> places_;  // by chunk and input slot; null: ours, or none
  std::vector<std::vector<bool>> found_;            // likewise: the place is in `kept_`
  std::vector<std::uint8_t*> means_;                // by chunk: of several inputs, if not the root
  std::vector<std::uint64_t> checksums_;            // of finished chunks
  Slab slab_;
};

}  // namespace atoll_core::engine
