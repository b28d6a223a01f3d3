// One op as the engine sees it: who takes part, which trees carry which chunks, how numbers are
// written. All integers, the same on every node; the digest proves it.
//
// Owner: a plain value. Threads: any. Failure: check_plan says what is malformed; nothing else may
// be called before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/ids.h"
#include "engine/status.h"
#include "kernels/codec.h"

namespace atoll_core::engine {

inline constexpr std::uint32_t kNobody = 0xffffffff;

struct Node {
  NodeName name;
  std::string host;  // or several, see find_candidates()
  std::uint16_t port = 0;
  // Stands for the bytes that this node contributes; 0: unknown. Bytes kept from an earlier attempt
  // are used again only under the same stamp.
  std::uint64_t stamp = 0;
};

// Two trees with one root. Up: `sources` contribute, weighted; every node on the way adds up what
// comes from below and what it contributes itself, and passes on the weighted mean. The root's mean
// is the result: its bytes go down unchanged. `up[n]` is where node n sends, `down[n]` where it
// hears from: node indices, kNobody for nodes outside; the root's are its own.
struct Lane {
  std::uint32_t root = 0;
  std::vector<std::uint32_t> sources;
  std::vector<std::uint64_t> weights;
  std::vector<std::uint32_t> up;
  std::vector<std::uint32_t> down;
};

// Everybody in `sources` sends straight to the root, everybody in `sinks` hears straight from it.
Lane star(std::uint32_t root, std::vector<std::uint32_t> sources,
          std::vector<std::uint64_t> weights, const std::vector<std::uint32_t>& sinks,
          std::size_t num_nodes);

struct Plan {
  OpId op;
  std::vector<Node> nodes;
  std::vector<Lane> lanes;
  Codec codec = Codec::kFp32;
  std::vector<std::int64_t> boundaries;    // of the block grid, in elements
  std::vector<std::int64_t> chunk_starts;  // in elements; one more than there are chunks
  std::vector<std::int64_t> chunk_lanes;
  // Names the order in which the model's elements follow each other here: the same boundaries in
  // another order are another grid.
  std::uint64_t order = 0;
  unsigned connections = 1;  // between two nodes that exchange data
  // This node's own affair, and no part of what must agree: which chunks its buffers hold, one after
  // the other. Empty: all of them.
  std::vector<bool> held;
};

// Names the bytes of one part of a tree by all that they depend on, chunk apart; 0: no name.
using ContentKey = std::uint64_t;

struct Input {
  std::uint32_t node = 0;    // this node itself: its own contribution
  std::uint64_t weight = 0;  // of all sources whose updates are in it
  ContentKey key = 0;
  bool leaf = false;  // contributed by `node` alone, which waits for nobody
};

// What this node does in a lane. One input alone is passed on as it is.
struct Station {
  std::vector<Input> inputs;         // in adding order: by their first source
  std::uint32_t parent = kNobody;    // gets the mean of the inputs; kNobody: the root, or no inputs
  std::uint32_t feeder = kNobody;    // has the finished bytes for this node; kNobody: the root, or
                                     // outside
  std::vector<std::uint32_t> below;  // get the finished bytes from this node
  ContentKey finished_key = 0;
  std::uint32_t hops = 0;  // from here up to the root; 0: the root, or nothing goes up from here
  bool is_root = false;

  // Without business in the lane: it neither needs nor waits for anything.
  bool idle() const {
    return !is_root && inputs.empty() && feeder == kNobody && below.empty();
  }
};

// A checked plan with what follows from it.
struct Layout {
  std::uint32_t self = 0;
  std::vector<std::size_t>
      offsets;               // chunk c is bytes [offsets[c], offsets[c + 1]) of the encoded vector
  std::uint64_t digest = 0;  // over all that must agree; addresses and deadlines need not
  std::uint64_t grid_key = 0;     // over the codec, the boundaries and their order
  bool contributes = false;       // this node is a source of a lane that has chunks
  std::vector<Station> stations;  // by lane
  std::size_t num_partners = 0;   // other nodes that data is exchanged with
  // Chunk c begins here in this node's buffers, if they hold it.
  std::vector<std::size_t> buffer_offsets;
  std::size_t buffer_bytes = 0;

  std::size_t chunk_bytes(std::uint32_t chunk) const { return offsets[chunk + 1] - offsets[chunk]; }
};

Status check_plan(const Plan& plan, const NodeName& self, Layout* out);

}  // namespace atoll_core::engine
