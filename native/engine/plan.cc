#include "engine/plan.h"

#include <algorithm>
#include <limits>
#include <set>

#include "engine/frame.h"
#include "engine/hello.h"
#include "engine/wire.h"

namespace atoll_core::engine {
namespace {

std::string number(std::uint64_t value) { return std::to_string(value); }

Status check_nodes(const Plan& plan, const NodeName& self, Layout* out) {
  std::set<NodeName> seen;
  bool found = false;
  for (std::uint32_t i = 0; i < plan.nodes.size(); ++i) {
    const NodeName& name = plan.nodes[i].name;
    if (name.peer.empty() || name.peer.size() > kMaxPeerBytes ||
        name.peer.find('\0') != std::string::npos) {
      return bad_argument("node " + number(i) + ": a peer id has 1 to " + number(kMaxPeerBytes) +
                          " bytes");
    }
    if (!seen.insert(name).second)
      return bad_argument("node " + to_string(name) + " is in the plan twice");
    if (name == self) {
      out->self = i;
      found = true;
    }
  }
  if (!found) return bad_argument("this node, " + to_string(self) + ", is not in the plan");
  return success();
}

Status check_indices(const std::vector<std::uint32_t>& indices, std::size_t num_nodes,
                     const std::string& where) {
  std::set<std::uint32_t> seen;
  for (const std::uint32_t index : indices) {
    if (index >= num_nodes)
      return bad_argument(where + " name node " + number(index) + " of " + number(num_nodes));
    if (!seen.insert(index).second)
      return bad_argument(where + " name node " + number(index) + " twice");
  }
  return success();
}

Status check_weights(const Lane& lane, const std::string& where) {
  if (lane.weights.size() != lane.sources.size()) {
    return bad_argument(where + " has " + number(lane.sources.size()) + " sources but " +
                        number(lane.weights.size()) + " weights");
  }
  std::uint64_t room = std::numeric_limits<std::int64_t>::max();
  for (const std::uint64_t weight : lane.weights) {
    if (weight == 0) return bad_argument(where + " has a weight of 0; leave that source out");
    if (weight > room) return bad_argument(where + ": the sum of the weights does not fit 63 bits");
    room -= weight;
  }
  return success();
}

Status check_lanes(const Plan& plan) {
  for (std::size_t i = 0; i < plan.lanes.size(); ++i) {
    const Lane& lane = plan.lanes[i];
    const std::string where = "lane " + number(i);
    if (lane.root >= plan.nodes.size())
      return bad_argument(where + " has root " + number(lane.root));
    if (lane.sources.empty()) return bad_argument(where + " has no sources");
    if (Status s = check_indices(lane.sources, plan.nodes.size(), "the sources of " + where);
        !s.ok())
      return s;
    if (Status s = check_indices(lane.sinks, plan.nodes.size(), "the sinks of " + where); !s.ok())
      return s;
    if (Status s = check_weights(lane, where); !s.ok()) return s;
  }
  return success();
}

Status check_chunks(const Plan& plan, Layout* out) {
  const auto& starts = plan.chunk_starts;
  const std::size_t num_chunks = plan.chunk_lanes.size();
  if (starts.size() != num_chunks + 1 || num_chunks >= std::numeric_limits<std::uint32_t>::max()) {
    return bad_argument(number(num_chunks) + " chunks need one more start than that, not " +
                        number(starts.size()));
  }
  if (starts.front() != 0 || starts.back() != plan.boundaries.back()) {
    return bad_argument("the chunks cover elements " + std::to_string(starts.front()) + " to " +
                        std::to_string(starts.back()) + ", the grid 0 to " +
                        std::to_string(plan.boundaries.back()));
  }
  out->offsets.assign(1, 0);
  for (std::size_t c = 0; c < num_chunks; ++c) {
    const std::string where = "chunk " + number(c);
    if (starts[c] >= starts[c + 1]) return bad_argument(where + " is empty");
    if (!is_block_boundary(plan.codec, plan.boundaries, starts[c])) {
      return bad_argument(where + " begins inside a block, at element " +
                          std::to_string(starts[c]));
    }
    if (plan.chunk_lanes[c] < 0 ||
        plan.chunk_lanes[c] >= static_cast<std::int64_t>(plan.lanes.size())) {
      return bad_argument(where + " is on lane " + std::to_string(plan.chunk_lanes[c]) + " of " +
                          number(plan.lanes.size()));
    }
    const auto bytes = static_cast<std::uint64_t>(
        range_bytes(plan.codec, plan.boundaries, starts[c], starts[c + 1]));
    if (bytes > kMaxChunkBytes)
      return bad_argument(where + " has " + number(bytes) + " bytes; too many for one frame");
    out->offsets.push_back(out->offsets.back() + bytes);
    const auto& sources = plan.lanes[static_cast<std::size_t>(plan.chunk_lanes[c])].sources;
    out->contributes |= std::ranges::find(sources, out->self) != sources.end();
  }
  return success();
}

// The plan as bytes: every list is preceded by its length, so that no two plans give the same.
class Transcript {
 public:
  void add(std::uint64_t value) {
    bytes_.resize(bytes_.size() + sizeof value);
    put(bytes_.data() + bytes_.size() - sizeof value, value);
  }
  void add(const std::string& text) {
    add(text.size());
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.size());
    for (const T value : values) add(static_cast<std::uint64_t>(value));
  }
  std::uint64_t digest() const { return get<std::uint64_t>(sha256(bytes_).data()); }

 private:
  std::vector<std::uint8_t> bytes_;
};

std::uint64_t digest_of(const Plan& plan) {
  Transcript transcript;
  transcript.add(plan.nodes.size());
  for (const Node& node : plan.nodes) {
    transcript.add(node.name.peer);
    transcript.add(node.name.rank);
  }
  transcript.add(plan.lanes.size());
  for (const Lane& lane : plan.lanes) {
    transcript.add(lane.root);
    transcript.add(lane.sources);
    transcript.add(lane.weights);
    transcript.add(lane.sinks);
  }
  transcript.add(std::string(layout(plan.codec).name));
  transcript.add(plan.boundaries);
  transcript.add(plan.chunk_starts);
  transcript.add(plan.chunk_lanes);
  return transcript.digest();
}

}  // namespace

Status check_plan(const Plan& plan, const NodeName& self, Layout* out) {
  *out = {};
  if (Status s = check_nodes(plan, self, out); !s.ok()) return s;
  if (Status s = check_lanes(plan); !s.ok()) return s;
  if (!valid_boundaries(plan.boundaries))
    return bad_argument("the grid's boundaries must begin at 0 and never fall");
  if (Status s = check_chunks(plan, out); !s.ok()) return s;
  out->digest = digest_of(plan);
  return success();
}

}  // namespace atoll_core::engine
