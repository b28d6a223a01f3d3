// The books of one op on one node: what it still lacks, owes, and may send. No sockets, no memory,
// no clock.
//
// Up: for each chunk the inputs of this node's station must come; if there are several, or this is
// the root, they are summed; what results is owed to the parent. Down: the finished chunk comes
// from the feeder (or is the root's own sum), and is owed to the nodes below. The op is done when
// nothing is lacking, nothing is to be summed, and all that was owed is acked.
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

// A contribution is what goes up: one node's own, or a mean of several.
enum class Phase : std::uint8_t { kContribution, kFinished };

struct Piece {
  Phase phase = Phase::kContribution;
  std::uint32_t chunk = 0;
  bool operator==(const Piece&) const = default;
};

enum class Expected { kNew, kDuplicate, kNever };

class OpBook {
 public:
  // `plan` must have passed check_plan, which gave `layout`; both outlive the book.
  OpBook(const Plan& plan, const Layout& layout);

  // ---- what comes in ----
  Expected expects(std::uint32_t from, Piece piece) const;
  // Of a piece that is expected as new. True if the chunk now has all inputs and is to be summed.
  bool received(std::uint32_t from, Piece piece);
  // Which of the station's inputs comes from `node`.
  std::optional<std::uint32_t> input_slot(std::uint32_t chunk, std::uint32_t node) const;

  // ---- what is here from the beginning ----
  // An earlier attempt left this piece here: like received(), and its sender is told by
  // held_from().
  void hold(std::uint32_t from, Piece piece);
  // The root has the finished chunk from an earlier attempt: nothing more need come up.
  void hold_finished(std::uint32_t chunk);
  const std::vector<Piece>& held_from(std::uint32_t node) const { return ledger_[node].held; }
  // Chunks that lack no input, and are to be summed when the op begins.
  std::vector<std::uint32_t> complete_at_start() const;

  // ---- what this node sums ----
  const Station& station(std::uint32_t chunk) const {
    return layout_.stations[static_cast<std::size_t>(plan_.chunk_lanes[chunk])];
  }
  // The sum is there: from now on it is owed to the parent or, if this is the root, to those below.
  void summed(std::uint32_t chunk);

  // ---- what goes out ----
  // Takes the next piece for `to`, contributions first: they let others work, while finished chunks
  // are the end. Of this node's own, those with the longest way to go are first, and lanes take
  // turns: whoever passes them on over a thin link can fill that soon.
  std::optional<Piece> next(std::uint32_t to);
  // Something for `to` waits to be taken.
  bool has_next(std::uint32_t to) const;
  // `to` holds the piece, whether or not it was sent. Repeated and unknown acks change nothing.
  void acked(std::uint32_t to, Piece piece);
  // `to` holds everything that it could get from here.
  void acked_all(std::uint32_t to);
  // The way on which it was sent is gone: it goes out again, unless acked.
  void send_again(std::uint32_t to, Piece piece);

  // ---- where it stands ----
  bool done() const { return open_ == 0; }
  // Every other node that this op has business with; asked at its beginning: all of them, also
  // those that only have to hear what is held.
  std::vector<std::uint32_t> partners() const;
  // Something is still to come from, or to be acked by, this node.
  bool needs(std::uint32_t node) const;
  bool lacks_from(std::uint32_t node) const;
  // What it contributes itself and nobody else can delay.
  bool lacks_contributions_from(std::uint32_t node) const {
    return ledger_[node].lacking_contributions > 0;
  }
  // Owed and already there to be sent: only the other end or the link can be late.
  bool waits_for_ack_of(std::uint32_t node) const { return ledger_[node].ready > 0; }
  // Pieces of which it has not said that it has them.
  std::uint64_t owed(std::uint32_t node) const { return ledger_[node].owed; }
  bool owes(std::uint32_t node) const { return owed(node) > 0; }
  // What is here, by input slot, and of finished chunks.
  bool has(std::uint32_t chunk, std::size_t slot) const { return chunks_[chunk].arrived[slot]; }
  bool has_finished(std::uint32_t chunk) const { return chunks_[chunk].finished; }

 private:
  struct Ledger {
    std::uint64_t lacking = 0;
    std::uint64_t lacking_contributions = 0;  // of these: not waiting for nodes further down
    std::uint64_t owed = 0;                   // not acked yet, whether or not it exists yet
    std::uint64_t ready = 0;                  // not acked yet, and exists
    std::deque<Piece> contributions;          // exist and were not handed out yet
    std::deque<Piece> finished;
    std::vector<Piece> held;
  };
  struct Chunk {
    std::uint32_t missing = 0;     // inputs
    std::vector<bool> arrived;     // by input slot
    bool to_sum = false;           // once no input is missing
    bool risen = false;            // what goes to the parent exists
    bool finished = false;         // the finished chunk is here
    bool acked_up = false;         // by the parent
    std::vector<bool> acked_down;  // by slot of `below`
  };

  // All chunks, in the order in which this node's own contributions go out.
  std::vector<std::uint32_t> sending_order() const;
  void open(std::uint32_t index);
  void mark_arrived(std::uint32_t from, Piece piece);
  // What goes up exists now.
  void rise(std::uint32_t index);
  // The finished chunk is here now.
  void descend(std::uint32_t index);
  void offer(std::uint32_t to, Piece piece);
  // Whether the piece, if it is owed to `to` at all, is still to be acked by it.
  bool awaits_ack(std::uint32_t to, Piece piece) const;

  const Plan& plan_;
  const Layout& layout_;
  std::vector<Ledger> ledger_;  // by node
  std::vector<Chunk> chunks_;
  std::uint64_t open_ = 0;  // all pieces lacking or owed, and all chunks to be summed
};

}  // namespace atoll_core::engine
