// One op under way: its plan and books, the caller's buffers, memory for what others contribute,
// its deadlines.
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
#include "engine/op.h"
#include "engine/plan.h"
#include "engine/registry.h"

namespace atoll_core::engine {

// The caller's memory: this engine's until the op's report has been given.
struct Buffers {
  const std::uint8_t* contribution = nullptr;  // null if this node does not contribute
  std::uint8_t* result = nullptr;
};

// A block of memory, not cleared. Spares one allocation and its page faults per op.
struct Slab {
  std::unique_ptr<std::uint8_t[]> bytes;
  std::size_t size = 0;

  void ensure(std::size_t wanted);
};

struct Sum {
  bool finite = false;
  std::uint64_t checksum = 0;  // of the finished bytes
  double seconds = 0.0;
};

class Transfer {
 public:
  Transfer(Plan plan, Layout layout, Buffers buffers, Seconds deadline, Slab slab, Time now);
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
  // What is sent for a piece of this node.
  const std::uint8_t* bytes_of(Piece piece) const;
  std::uint64_t checksum_of(Piece piece) const;

  // Adds up, divides and encodes a chunk into the result. On the pool.
  Sum sum(std::uint32_t chunk);
  void summed(std::uint32_t chunk, const Sum& sum);

  bool begun(std::uint32_t node) const { return begun_[node]; }
  void set_begun(std::uint32_t node) { begun_[node] = true; }

  Slab take_slab() { return std::move(slab_); }

  Time started_at;
  Time expires_at;
  std::atomic<bool> cancelled{false};  // sums that have not begun need not
  unsigned sums_under_way = 0;
  Report report;  // filled as the op goes on

 private:
  const Lane& lane_of(std::uint32_t chunk) const;
  // Where the lane's source `slot`, not this node, has its contribution to a chunk that is summed
  // here.
  std::uint8_t* contributed(std::uint32_t chunk, std::size_t slot) const;

  Plan plan_;
  Layout layout_;
  Buffers buffers_;
  OpBook book_;
  std::map<NodeName, std::uint32_t> index_;
  std::vector<bool> begun_;
  std::vector<std::size_t> slots_;  // by chunk: where its contributions begin in the slab
  std::vector<std::uint64_t> checksums_;
  Slab slab_;
};

}  // namespace atoll_core::engine
