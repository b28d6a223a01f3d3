#include "engine/plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

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

// Every node of the tree must come to the root.
Status check_tree(const std::vector<std::uint32_t>& parents, const Lane& lane,
                  std::size_t num_nodes, const std::string& where) {
  if (parents.size() != num_nodes) {
    return bad_argument(where + " has " + number(parents.size()) + " entries for " +
                        number(num_nodes) + " nodes");
  }
  if (parents[lane.root] != lane.root) return bad_argument(where + " leaves its root");
  std::vector<bool> arrives(num_nodes, false);
  arrives[lane.root] = true;
  for (std::uint32_t node = 0; node < num_nodes; ++node) {
    std::vector<std::uint32_t> path;
    for (std::uint32_t at = node; parents[node] != kNobody && !arrives[at]; at = parents[at]) {
      path.push_back(at);
      if (path.size() > num_nodes || parents[at] >= num_nodes) {
        return bad_argument(where + " does not lead from node " + number(node) + " to its root");
      }
    }
    for (const std::uint32_t passed : path) arrives[passed] = true;
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
    if (Status s = check_weights(lane, where); !s.ok()) return s;
    if (Status s = check_tree(lane.up, lane, plan.nodes.size(), "the way up of " + where); !s.ok())
      return s;
    if (Status s = check_tree(lane.down, lane, plan.nodes.size(), "the way down of " + where);
        !s.ok())
      return s;
    for (const std::uint32_t source : lane.sources) {
      if (lane.up[source] == kNobody)
        return bad_argument(where + ": source " + number(source) + " is not on the way up");
    }
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
    transcript.add(node.stamp);
  }
  transcript.add(plan.lanes.size());
  for (const Lane& lane : plan.lanes) {
    transcript.add(lane.root);
    transcript.add(lane.sources);
    transcript.add(lane.weights);
    transcript.add(lane.up);
    transcript.add(lane.down);
  }
  transcript.add(std::string(layout(plan.codec).name));
  transcript.add(plan.boundaries);
  transcript.add(plan.chunk_starts);
  transcript.add(plan.chunk_lanes);
  transcript.add(plan.order);
  return transcript.digest();
}

std::uint64_t grid_key_of(const Plan& plan) {
  Transcript transcript;
  transcript.add(std::string(layout(plan.codec).name));
  transcript.add(plan.boundaries);
  transcript.add(plan.order);
  return transcript.digest();
}

// One lane's way up, as seen from all its nodes.
class WayUp {
 public:
  WayUp(const Plan& plan, const Lane& lane) : plan_(plan), lane_(lane) {
    const std::size_t n = plan.nodes.size();
    weights_.assign(n, 0);
    first_.assign(n, kNobody);
    own_.assign(n, kNobody);
    children_.resize(n);
    for (std::uint32_t order = 0; order < lane.sources.size(); ++order) {
      own_[lane.sources[order]] = order;
      for (std::uint32_t at = lane.sources[order];; at = lane.up[at]) {
        weights_[at] += lane.weights[order];
        const bool seen = first_[at] != kNobody;
        first_[at] = std::min(first_[at], order);
        if (at == lane.root) break;
        if (!seen) children_[lane.up[at]].push_back(at);
      }
    }
  }

  std::vector<Input> inputs(std::uint32_t node) const {
    std::vector<Input> inputs;
    if (own_[node] != kNobody)
      inputs.push_back({node, lane_.weights[own_[node]], plan_.nodes[node].stamp, true});
    for (const std::uint32_t child : children_[node])
      inputs.push_back({child, weights_[child], key(child), children_[child].empty()});
    std::ranges::sort(inputs, {}, [&](const Input& input) {
      return input.node == node ? own_[node] : first_[input.node];
    });
    return inputs;
  }

  // Of what goes up from `node`.
  ContentKey key(std::uint32_t node) const {
    if (!known_.contains(node)) known_[node] = key_of(inputs(node));
    return known_[node];
  }

 private:
  static ContentKey key_of(const std::vector<Input>& inputs) {
    if (inputs.size() == 1) return inputs[0].key;
    Transcript transcript;
    for (const Input& input : inputs) {
      if (input.key == 0) return 0;
      transcript.add(input.weight);
      transcript.add(input.key);
    }
    return transcript.digest();
  }

  const Plan& plan_;
  const Lane& lane_;
  std::vector<std::uint64_t> weights_;                // of the tree below and at each node
  std::vector<std::uint32_t> first_;                  // its first source, by order in the lane
  std::vector<std::uint32_t> own_;                    // order among the sources, or kNobody
  std::vector<std::vector<std::uint32_t>> children_;  // with sources at or below them
  mutable std::map<std::uint32_t, ContentKey> known_;
};

Station station_of(const Plan& plan, const Lane& lane, std::uint32_t self) {
  Station station;
  if (lane.up[self] == kNobody && lane.down[self] == kNobody) return station;
  const WayUp way(plan, lane);
  station.inputs = way.inputs(self);
  station.is_root = lane.root == self;
  station.finished_key = way.key(lane.root);
  if (!station.is_root && !station.inputs.empty()) {
    station.parent = lane.up[self];
    for (std::uint32_t at = self; at != lane.root; at = lane.up[at]) ++station.hops;
  }
  if (!station.is_root) station.feeder = lane.down[self];
  for (std::uint32_t node = 0; node < lane.down.size(); ++node) {
    if (node != lane.root && lane.down[node] == self) station.below.push_back(node);
  }
  return station;
}

// A rank's buffers hold what it owns: the chunks of the lanes that pass it, one after the other.
Status place_chunks(const Plan& plan, Layout* out) {
  const std::size_t num_chunks = plan.chunk_lanes.size();
  if (!plan.held.empty() && plan.held.size() != num_chunks) {
    return bad_argument("it is said of " + number(plan.held.size()) + " chunks whether this node's " +
                        "buffers hold them; there are " + number(num_chunks));
  }
  out->buffer_offsets.reserve(num_chunks);
  for (std::uint32_t c = 0; c < num_chunks; ++c) {
    const bool held = plan.held.empty() || plan.held[c];
    if (!held && !out->stations[static_cast<std::size_t>(plan.chunk_lanes[c])].idle()) {
      return bad_argument("chunk " + number(c) + " passes " + to_string(plan.nodes[out->self].name) +
                          ", whose buffers do not hold it");
    }
    out->buffer_offsets.push_back(out->buffer_bytes);
    if (held) out->buffer_bytes += out->chunk_bytes(c);
  }
  return success();
}

std::size_t count_partners(const Layout& layout) {
  std::set<std::uint32_t> partners;
  for (const Station& station : layout.stations) {
    for (const Input& input : station.inputs) partners.insert(input.node);
    partners.insert(station.below.begin(), station.below.end());
    partners.insert({station.parent, station.feeder});
  }
  partners.erase(kNobody);
  partners.erase(layout.self);
  return partners.size();
}

}  // namespace

Lane star(std::uint32_t root, std::vector<std::uint32_t> sources,
          std::vector<std::uint64_t> weights, const std::vector<std::uint32_t>& sinks,
          std::size_t num_nodes) {
  Lane lane{root, std::move(sources), std::move(weights), {}, {}};
  lane.up.assign(num_nodes, kNobody);
  lane.down.assign(num_nodes, kNobody);
  for (const std::uint32_t source : lane.sources) lane.up[source] = root;
  for (const std::uint32_t sink : sinks) lane.down[sink] = root;
  lane.up[root] = lane.down[root] = root;
  return lane;
}

Status check_plan(const Plan& plan, const NodeName& self, Layout* out) {
  *out = {};
  if (Status s = check_nodes(plan, self, out); !s.ok()) return s;
  if (Status s = check_lanes(plan); !s.ok()) return s;
  if (!valid_boundaries(plan.boundaries))
    return bad_argument("the grid's boundaries must begin at 0 and never fall");
  if (Status s = check_chunks(plan, out); !s.ok()) return s;
  for (const Lane& lane : plan.lanes) out->stations.push_back(station_of(plan, lane, out->self));
  if (Status s = place_chunks(plan, out); !s.ok()) return s;
  out->num_partners = count_partners(*out);
  out->digest = digest_of(plan);
  out->grid_key = grid_key_of(plan);
  return success();
}

}  // namespace atoll_core::engine
