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

struct Node {
  NodeName name;
  std::string host;
  std::uint16_t port = 0;
};

// A star: `sources` send their contributions to `root`, which adds them in this order, weighted,
// and sends the finished bytes to `sinks`. All are node indices; the root may be a source, and
// always holds the result.
struct Lane {
  std::uint32_t root = 0;
  std::vector<std::uint32_t> sources;
  std::vector<std::uint64_t> weights;
  std::vector<std::uint32_t> sinks;
};

struct Plan {
  OpId op;
  std::vector<Node> nodes;
  std::vector<Lane> lanes;
  Codec codec = Codec::kFp32;
  std::vector<std::int64_t> boundaries;    // of the block grid, in elements
  std::vector<std::int64_t> chunk_starts;  // in elements; one more than there are chunks
  std::vector<std::int64_t> chunk_lanes;
};

// A checked plan with what follows from it.
struct Layout {
  std::uint32_t self = 0;
  std::vector<std::size_t>
      offsets;               // chunk c is bytes [offsets[c], offsets[c + 1]) of the encoded vector
  std::uint64_t digest = 0;  // over all that must agree; addresses and deadlines need not
  bool contributes = false;  // this node is a source of a lane that has chunks

  std::size_t wire_bytes() const { return offsets.back(); }
  std::size_t chunk_bytes(std::uint32_t chunk) const { return offsets[chunk + 1] - offsets[chunk]; }
};

Status check_plan(const Plan& plan, const NodeName& self, Layout* out);

}  // namespace atoll_core::engine
