// The books of an op, without sockets: whatever the order of events, every node ends done, every
// chunk is summed once with all its contributions, and duplicates change nothing.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "engine/op.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

// A random tree over some of the nodes: each hangs under one that was there before.
std::vector<std::uint32_t> random_parents(std::uint32_t root,
                                          const std::vector<std::uint32_t>& nodes,
                                          std::uint32_t world, std::mt19937& random) {
  std::vector<std::uint32_t> parents(world, kNobody);
  std::vector<std::uint32_t> there = {root};
  parents[root] = root;
  for (const std::uint32_t node : nodes) {
    if (node == root) continue;
    parents[node] = there[random() % there.size()];
    there.push_back(node);
  }
  return parents;
}

// `world` nodes; lanes are random trees, or stars, with random roots and sources; everybody hears
// the result, or only some do.
Plan random_plan(std::uint32_t world, std::mt19937& random) {
  Plan plan;
  for (std::uint32_t i = 0; i < world; ++i)
    plan.nodes.push_back({{std::string(1, static_cast<char>('a' + i)), 0}, "h", 1});
  const auto some = [&](bool at_least_one) {
    std::vector<std::uint32_t> nodes;
    for (std::uint32_t i = 0; i < world; ++i) {
      if (random() % 3 != 0) nodes.push_back(i);
    }
    if (nodes.empty() && at_least_one) nodes.push_back(random() % world);
    return nodes;
  };
  const std::uint32_t num_lanes = 1 + random() % 4;
  for (std::uint32_t i = 0; i < num_lanes; ++i) {
    const std::uint32_t root = random() % world;
    Lane lane = star(root, some(true), {}, some(false), world);
    lane.weights.assign(lane.sources.size(), 1);
    if (random() % 3 != 0) {
      std::vector<std::uint32_t> nodes = lane.sources;
      for (std::uint32_t node = 0; node < world; ++node) {
        const bool passes_on = random() % 2 == 0 && std::ranges::find(nodes, node) == nodes.end();
        if (passes_on) nodes.push_back(node);
      }
      std::ranges::shuffle(nodes, random);
      lane.up = random_parents(root, nodes, world, random);
      lane.down = random_parents(root, some(false), world, random);
    }
    plan.lanes.push_back(lane);
  }
  const std::uint32_t num_chunks = random() % 7;
  plan.boundaries = {0, 256 * static_cast<std::int64_t>(num_chunks)};
  for (std::uint32_t c = 0; c <= num_chunks; ++c) plan.chunk_starts.push_back(256 * c);
  for (std::uint32_t c = 0; c < num_chunks; ++c) plan.chunk_lanes.push_back(random() % num_lanes);
  return plan;
}

struct Message {
  std::uint32_t from, to;
  Piece piece;
  bool ack;
};

// All nodes of one op, and messages that are delivered in random order, some twice.
class World {
 public:
  World(const Plan& plan, std::mt19937& random)
      : plan_(plan), random_(random), layouts_(plan.nodes.size()), sums_(plan.chunk_lanes.size()) {
    for (std::uint32_t node = 0; node < plan.nodes.size(); ++node) {
      CHECK(check_plan(plan, plan.nodes[node].name, &layouts_[node]).ok());
      books_.push_back(std::make_unique<OpBook>(plan, layouts_[node]));
    }
  }

  // Some nodes hold already what an earlier attempt has brought them, and say so before all else.
  void hold_some() {
    for (std::uint32_t to = 0; to < books_.size(); ++to) {
      for (std::uint32_t from = 0; from < books_.size(); ++from) {
        for (std::uint32_t c = 0; c < plan_.chunk_lanes.size(); ++c) {
          for (const Phase phase : {Phase::kContribution, Phase::kFinished}) {
            const Piece piece{phase, c};
            if (random_() % 3 != 0 || books_[to]->expects(from, piece) != Expected::kNew) continue;
            books_[to]->hold(from, piece);
            books_[from]->acked(to, piece);
          }
        }
      }
    }
  }

  void begin() {
    for (std::uint32_t node = 0; node < books_.size(); ++node) {
      for (const std::uint32_t chunk : books_[node]->complete_at_start())
        to_sum_.emplace_back(node, chunk);
    }
  }

  bool step() {
    if (!to_sum_.empty() && (messages_.empty() || random_() % 2 == 0)) {
      const auto [node, chunk] = take(to_sum_);
      sums_[chunk].push_back(node);
      books_[node]->summed(chunk);
    } else if (!messages_.empty() && random_() % 2 == 0) {
      deliver(take(messages_));
    } else if (!send_something()) {
      if (messages_.empty()) return !to_sum_.empty();
      deliver(take(messages_));
    }
    return true;
  }

  void check_end() {
    for (std::uint32_t node = 0; node < books_.size(); ++node) {
      CHECK(books_[node]->done());
      for (std::uint32_t other = 0; other < books_.size(); ++other)
        CHECK(!books_[node]->needs(other));
    }
    for (std::uint32_t c = 0; c < sums_.size(); ++c) {
      std::ranges::sort(sums_[c]);
      CHECK(std::ranges::adjacent_find(sums_[c]) == sums_[c].end());
      CHECK(std::ranges::find(sums_[c], plan_.lanes[lane_of(c)].root) != sums_[c].end());
    }
  }

 private:
  template <class T>
  T take(std::vector<T>& from) {
    std::swap(from[random_() % from.size()], from.back());
    T item = from.back();
    from.pop_back();
    return item;
  }

  bool send_something() {
    for (std::uint32_t from = 0; from < books_.size(); ++from) {
      for (std::uint32_t to = 0; to < books_.size(); ++to) {
        if (const auto piece = books_[from]->next(to)) {
          CHECK(books_[from]->waits_for_ack_of(to));
          messages_.push_back({from, to, *piece, false});
          if (random_() % 4 == 0) messages_.push_back({from, to, *piece, false});
          return true;
        }
      }
    }
    return false;
  }

  void deliver(const Message& message) {
    OpBook& book = *books_[message.to];
    if (message.ack) {
      book.acked(message.from, message.piece);
      return;
    }
    const Expected expected = book.expects(message.from, message.piece);
    CHECK(expected != Expected::kNever);
    if (expected == Expected::kNew) {
      CHECK(book.lacks_from(message.from));
      if (book.received(message.from, message.piece))
        to_sum_.emplace_back(message.to, message.piece.chunk);
    }
    messages_.push_back({message.to, message.from, message.piece, true});
    if (random_() % 4 == 0) messages_.push_back({message.to, message.from, message.piece, true});
  }

  std::size_t lane_of(std::uint32_t chunk) const {
    return static_cast<std::size_t>(plan_.chunk_lanes[chunk]);
  }

  const Plan& plan_;
  std::mt19937& random_;
  std::vector<Layout> layouts_;
  std::vector<std::unique_ptr<OpBook>> books_;
  std::vector<Message> messages_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> to_sum_;
  std::vector<std::vector<std::uint32_t>> sums_;  // by chunk: the nodes that summed it
};

void any_order_of_events_ends_well() {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const Plan plan = random_plan(1 + seed % 9, random);
    World world(plan, random);
    if (seed % 2 == 0) world.hold_some();
    world.begin();
    while (world.step()) {
    }
    const int before = atoll_test::failures();
    world.check_end();
    if (atoll_test::failures() != before) std::fprintf(stderr, "seed %u\n", seed);
  }
}

struct Booked {
  explicit Booked(const Plan& plan, std::uint32_t node)
      : checked(check_plan(plan, plan.nodes[node].name, &layout).ok()), book(plan, layout) {
    CHECK(checked);
  }
  Layout layout;
  bool checked;
  OpBook book;
};

Plan star_of_three() {
  Plan plan;
  for (const char* peer : {"a", "b", "c"}) plan.nodes.push_back({{peer, 0}, "h", 1});
  plan.lanes = {star(0, {0, 1, 2}, {1, 1, 1}, {0, 1, 2}, 3), star(1, {0, 2}, {1, 1}, {0, 1}, 3)};
  plan.boundaries = {0, 512};
  plan.chunk_starts = {0, 256, 512};
  plan.chunk_lanes = {0, 1};
  return plan;
}

void what_does_not_belong_is_never_expected() {
  const Plan plan = star_of_three();
  Booked booked(plan, 0);
  const OpBook& book = booked.book;
  CHECK(book.expects(1, {Phase::kContribution, 0}) == Expected::kNew);
  CHECK(book.expects(0, {Phase::kContribution, 0}) == Expected::kNever);  // from itself
  CHECK(book.expects(1, {Phase::kContribution, 1}) == Expected::kNever);  // not rooted here
  CHECK(book.expects(1, {Phase::kFinished, 1}) == Expected::kNew);
  CHECK(book.expects(2, {Phase::kFinished, 1}) == Expected::kNever);  // not its root
  CHECK(book.expects(1, {Phase::kFinished, 0}) == Expected::kNever);  // rooted here
  CHECK(book.expects(1, {Phase::kFinished, 2}) == Expected::kNever);  // no such chunk
  Booked third(plan, 2);
  CHECK(third.book.expects(1, {Phase::kFinished, 1}) == Expected::kNever);  // no sink of that lane
}

void acks_of_strangers_change_nothing() {
  const Plan plan = star_of_three();
  Booked booked(plan, 0);
  OpBook& book = booked.book;
  book.acked(2, {Phase::kContribution, 1});
  book.acked(1, {Phase::kContribution, 9});
  CHECK(book.owes(1) && book.waits_for_ack_of(1));
  book.acked(1, {Phase::kContribution, 1});
  book.acked(1, {Phase::kContribution, 1});
  CHECK(book.owes(1) && !book.waits_for_ack_of(1));  // the finished chunk, which does not exist yet
  CHECK(!book.done());
}

void what_the_other_end_holds_is_not_sent() {
  const Plan plan = star_of_three();
  Booked booked(plan, 0);
  OpBook& book = booked.book;
  book.acked(1, {Phase::kFinished, 0});  // from an earlier attempt: it is not even summed here
  book.acked(1, {Phase::kContribution, 1});
  CHECK(!book.next(1));
  CHECK(!book.owes(1));
  book.hold(1, {Phase::kContribution, 0});
  CHECK((book.held_from(1) == std::vector<Piece>{{Phase::kContribution, 0}}));
  CHECK(book.complete_at_start().empty());
  CHECK(book.received(2, {Phase::kContribution, 0}));
  book.summed(0);
  CHECK(!book.next(1));
  CHECK((book.next(2) == Piece{Phase::kFinished, 0}));
}

// a -> b -> c, and c's bytes come back to b and from b to a.
void a_chain_sums_on_its_way() {
  Plan plan = star_of_three();
  plan.lanes = {{2, {0, 1, 2}, {3, 4, 5}, {1, 2, 2}, {1, 2, 2}}};
  plan.chunk_lanes = {0, 0};
  Booked middle(plan, 1);
  const Station& here = middle.layout.stations[0];
  CHECK(here.inputs.size() == 2 && here.inputs[0].node == 0 && here.inputs[0].weight == 3);
  CHECK(here.inputs[1].node == 1 && here.inputs[1].weight == 4);
  CHECK(here.parent == 2 && here.feeder == 2 && here.below == std::vector<std::uint32_t>{0});
  CHECK(!middle.book.next(2));
  CHECK(middle.book.received(0, {Phase::kContribution, 0}));
  middle.book.summed(0);
  CHECK((middle.book.next(2) == Piece{Phase::kContribution, 0}));
  CHECK(!middle.book.received(2, {Phase::kFinished, 0}));
  CHECK((middle.book.next(0) == Piece{Phase::kFinished, 0}));
  Booked root(plan, 2);
  CHECK(root.layout.stations[0].inputs[0].weight == 7);
}

void trees_that_lead_nowhere_are_refused() {
  const auto refused = [](std::vector<std::uint32_t> up, std::vector<std::uint32_t> down) {
    Plan plan = star_of_three();
    plan.lanes[0].up = std::move(up);
    plan.lanes[0].down = std::move(down);
    Layout layout;
    return !check_plan(plan, {"a", 0}, &layout).ok();
  };
  CHECK(!refused({0, 2, 0}, {0, 0, 1}));
  CHECK(refused({0, 2, 1}, {0, 0, 0}));        // a circle
  CHECK(refused({0, kNobody, 0}, {0, 0, 0}));  // a source that goes nowhere
  CHECK(refused({0, 0}, {0, 0, 0}));
  CHECK(refused({0, 0, 3}, {0, 0, 0}));
  CHECK(refused({1, 0, 0}, {0, 0, 0}));
  CHECK(refused({0, 0, 0}, {0, kNobody, 1}));  // below somebody who hears nothing
}

void contributions_go_before_finished_chunks() {
  const Plan plan = star_of_three();
  Booked booked(plan, 0);
  OpBook& book = booked.book;
  book.received(1, {Phase::kContribution, 0});
  CHECK(book.received(2, {Phase::kContribution, 0}));
  book.summed(0);
  CHECK((book.next(1) == Piece{Phase::kContribution, 1}));
  CHECK((book.next(1) == Piece{Phase::kFinished, 0}));
  CHECK(!book.next(1));
  CHECK((book.next(2) == Piece{Phase::kFinished, 0}));
}

// Node 1 passes on what 2 sends in lanes 1 and 2, over links that may be thin; of lane 0 it is the
// root.
void the_longest_way_goes_first_and_lanes_take_turns() {
  Plan plan;
  for (const char* name : {"a", "b", "c"}) plan.nodes.push_back({{name, 0}, "h", 1});
  const Lane near = star(1, {0, 1, 2}, {1, 1, 1}, {0, 2}, 3);
  Lane far = star(0, {0, 1, 2}, {1, 1, 1}, {1, 2}, 3);
  far.up[2] = 1;
  plan.lanes = {near, far, far};
  plan.boundaries = {0, 256 * 6};
  for (int c = 0; c <= 6; ++c) plan.chunk_starts.push_back(256 * c);
  plan.chunk_lanes = {0, 0, 1, 1, 2, 2};
  Layout layout;
  CHECK(check_plan(plan, {"c", 0}, &layout).ok());
  OpBook book(plan, layout);
  for (const std::uint32_t chunk : {2u, 4u, 3u, 5u, 0u, 1u})
    CHECK(book.next(1) == (Piece{Phase::kContribution, chunk}));
  CHECK(!book.next(1));
}

void a_world_of_one_needs_nobody() {
  Plan plan = star_of_three();
  plan.nodes.resize(1);
  plan.lanes = {star(0, {0}, {5}, {0}, 1)};
  plan.chunk_lanes = {0, 0};
  Booked booked(plan, 0);
  OpBook& book = booked.book;
  CHECK(book.partners().empty());
  CHECK((book.complete_at_start() == std::vector<std::uint32_t>{0, 1}));
  CHECK(!book.done());
  book.summed(0);
  book.summed(1);
  CHECK(book.done());
}

void plans_differ_in_their_digests() {
  const Plan plan = star_of_three();
  Layout layout;
  CHECK(check_plan(plan, {"a", 0}, &layout).ok());
  const std::uint64_t digest = layout.digest;
  const auto differs = [&](auto change) {
    Plan other = plan;
    change(other);
    CHECK(check_plan(other, {"a", 0}, &layout).ok());
    return layout.digest != digest;
  };
  CHECK(!differs(
      [](Plan& p) { p.nodes[1].port = 99; }));  // an address may look different from elsewhere
  CHECK(differs([](Plan& p) { p.nodes[1].name.peer.push_back('x'); }));
  CHECK(differs([](Plan& p) { p.lanes[0].weights[2] = 2; }));
  CHECK(differs([](Plan& p) { p.lanes[0].up[2] = 1; }));
  CHECK(differs([](Plan& p) { p.nodes[1].stamp = 7; }));
  CHECK(differs([](Plan& p) { std::swap(p.lanes[0].sources[0], p.lanes[0].sources[1]); }));
  CHECK(differs([](Plan& p) { p.codec = atoll_core::Codec::kInt8; }));
  CHECK(differs([](Plan& p) { p.boundaries = {0, 256, 512}; }));
  CHECK(differs([](Plan& p) { p.chunk_lanes = {1, 0}; }));
}

}  // namespace

int main() {
  any_order_of_events_ends_well();
  what_does_not_belong_is_never_expected();
  acks_of_strangers_change_nothing();
  what_the_other_end_holds_is_not_sent();
  a_chain_sums_on_its_way();
  trees_that_lead_nowhere_are_refused();
  contributions_go_before_finished_chunks();
  the_longest_way_goes_first_and_lanes_take_turns();
  a_world_of_one_needs_nobody();
  plans_differ_in_their_digests();
  return atoll_test::failures() == 0 ? 0 : 1;
}
