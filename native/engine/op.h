// The books of one op on one node: what it still lacks, owes, and may send. No sockets, no memory,
// no clock.
//
// For a chunk this node roots, every other source's contribution must come, then it is to be
// summed, then the finished chunk is owed to the sinks. For any other chunk, a source owes its
// contribution to the root and a sink lacks the finished chunk. The op is done when nothing is
// lacking, nothing is to be summed, and all that was owed is acked.
//
// Owner: a Transfer. Threads: the loop's. Failure: none; what does not belong here is answered with
// kNever or false.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "engine/plan.h"

namespace atoll_core::engine {

enum class Phase : std::uint8_t { kContribution, kFinished };

struct Piece {
  Phase phase = Phase::kContribution;
  std::uint32_t chunk = 0;
  bool operator==(const Piece&) const = default;
};

enum class Expected { kNew, kDuplicate, kNever };

class OpBook {
 public:
  // `plan` must have passed check_plan and outlive the book.
  OpBook(const Plan& plan, std::uint32_t self);

  // ---- what comes in ----
  Expected expects(std::uint32_t from, Piece piece) const;
  // Of a piece that is expected as new. True if the chunk now has all contributions and is to be
  // summed.
  bool received(std::uint32_t from, Piece piece);
  // Which of the lane's sources `node` is.
  std::optional<std::uint32_t> source_slot(std::uint32_t chunk, std::uint32_t node) const;

  // ---- what this node sums ----
  // Chunks that need nobody else's contribution: to be summed when the op begins.
  std::vector<std::uint32_t> complete_at_start() const;
  // The finished bytes are there: from now on they are owed to the sinks.
  void summed(std::uint32_t chunk);

  // ---- what goes out ----
  // Takes the next piece for `to`, contributions first: they let others work, while finished chunks
  // are the end.
  std::optional<Piece> next(std::uint32_t to);
  bool has_next(std::uint32_t to) const { return !ledger_[to].queue.empty(); }
  // `to` holds the piece. Repeated and unknown acks change nothing.
  void acked(std::uint32_t to, Piece piece);

  // ---- where it stands ----
  bool done() const { return open_ == 0; }
  // Every other node that this op has business with, from its beginning.
  std::vector<std::uint32_t> partners() const;
  // Something is still to come from, or to be acked by, this node.
  bool needs(std::uint32_t node) const;
  bool lacks_from(std::uint32_t node) const;
  bool lacks_contributions_from(std::uint32_t node) const {
    return ledger_[node].lacking_contributions > 0;
  }
  // Owed and already there to be sent: only the other end or the link can be late.
  bool waits_for_ack_of(std::uint32_t node) const { return ledger_[node].ready > 0; }
  bool owes(std::uint32_t node) const { return ledger_[node].owed > 0; }

 private:
  struct Ledger {
    std::uint64_t lacking_contributions = 0;
    std::uint64_t lacking_finished = 0;
    std::uint64_t owed = 0;   // not acked yet, whether or not it exists yet
    std::uint64_t ready = 0;  // not acked yet, and exists
    std::deque<Piece> queue;  // exists and was not handed out yet
  };
  struct Chunk {
    bool rooted_here = false;
    std::uint32_t missing = 0;  // contributions, if rooted here
    std::vector<bool> arrived;  // by source slot, if rooted here
    std::vector<bool> acked;    // by sink slot if rooted here, else [0]: our contribution
    bool finished = false;      // arrived, or summed
  };

  const Lane& lane_of(std::uint32_t chunk) const;
  void open_root(std::uint32_t index, const Lane& lane);
  void open_leaf(std::uint32_t index, const Lane& lane);
  bool is_sink(const Lane& lane) const;

  const Plan& plan_;
  std::uint32_t self_;
  std::vector<Ledger> ledger_;  // by node
  std::vector<Chunk> chunks_;
  std::uint64_t open_ = 0;  // all pieces lacking or owed, and all chunks to be summed
};

}  // namespace atoll_core::engine
