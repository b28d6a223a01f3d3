// Peers of one, two and three ranks reduce together, each rank with buffers for its own part only;
// aborted and tried again at random moments. Meant for the sanitizers.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "tests/check.h"

namespace {

using namespace atoll_core;
using namespace atoll_core::engine;

// Peer a has one rank, b two, c three: on these stretches the same rank owns all in each of them.
const std::vector<NodeName> kNodes = {{"a", 0}, {"b", 0}, {"b", 1}, {"c", 0}, {"c", 1}, {"c", 2}};
const std::vector<std::int64_t> kBoundaries = {0, 260 * 256, 390 * 256, 520 * 256, 200'000};
const std::vector<std::vector<std::uint32_t>> kOwners = {{0, 1, 3}, {0, 1, 4}, {0, 2, 4}, {0, 2, 5}};
constexpr std::int64_t kChunk = 4096;
constexpr float kMean = 37.0f / 3;  // of 1, 4 and 32

float given_by(const NodeName& node) {
  return node.peer == "a" ? 1.0f : node.peer == "b" ? 4.0f : 32.0f;
}

std::unique_ptr<Engine> open(const NodeName& self) {
  Options options;
  options.run = "run";
  options.self = self;
  options.session_key = {1, 2, 3};
  options.bind_host = "127.0.0.1";
  options.connect_timeout = options.progress_timeout = Seconds(20);
  std::unique_ptr<Engine> engine;
  CHECK(Engine::create(options, &engine).ok());
  return engine;
}

// On every route each of its owners is the root of a star.
Plan plan_of(const std::vector<std::uint16_t>& ports, OpId op, std::uint32_t self) {
  Plan plan;
  plan.op = op;
  plan.order = 7;
  plan.boundaries = kBoundaries;
  for (std::size_t i = 0; i < kNodes.size(); ++i)
    plan.nodes.push_back({kNodes[i], "127.0.0.1", ports[i], i + 1});
  for (std::size_t route = 0; route < kOwners.size(); ++route) {
    const auto& owners = kOwners[route];
    for (const std::uint32_t root : owners)
      plan.lanes.push_back(star(root, owners, {1, 1, 1}, owners, kNodes.size()));
    std::size_t lane = 0;
    for (std::int64_t start = kBoundaries[route]; start < kBoundaries[route + 1]; start += kChunk) {
      plan.chunk_starts.push_back(start);
      plan.chunk_lanes.push_back(static_cast<std::int64_t>(3 * route + lane++ % 3));
      plan.held.push_back(std::ranges::find(owners, self) != owners.end());
    }
  }
  plan.chunk_starts.push_back(kBoundaries.back());
  return plan;
}

using Vector = std::vector<float>;

// A peer of several ranks has its vector in several parts.
std::size_t part_of(std::uint32_t node) {
  std::size_t numel = 0;
  for (std::size_t route = 0; route < kOwners.size(); ++route) {
    if (std::ranges::find(kOwners[route], node) != kOwners[route].end())
      numel += static_cast<std::size_t>(kBoundaries[route + 1] - kBoundaries[route]);
  }
  return numel;
}

class Crew {
 public:
  Crew() {
    for (const NodeName& name : kNodes) {
      engines_.push_back(open(name));
      ports_.push_back(engines_.back()->port());
    }
    for (std::uint32_t node = 0; node < kNodes.size(); ++node) {
      contributions_.emplace_back(part_of(node), given_by(kNodes[node]));
      results_.emplace_back(part_of(node));
    }
  }

  void start(OpId op) {
    for (std::uint32_t node = 0; node < kNodes.size(); ++node) {
      CHECK(engines_[node]
                ->start(plan_of(ports_, op, node),
                        reinterpret_cast<const std::uint8_t*>(contributions_[node].data()),
                        4 * contributions_[node].size(),
                        reinterpret_cast<std::uint8_t*>(results_[node].data()),
                        4 * results_[node].size(), Seconds(60))
                .ok());
    }
  }

  void abort(OpId op) {
    for (const auto& engine : engines_) engine->abort(op);
  }

  std::size_t finish(OpId op) {
    std::size_t succeeded = 0;
    for (std::size_t node = 0; node < kNodes.size(); ++node) {
      bool known = false;
      const auto report = engines_[node]->wait(op, Seconds(90), &known);
      CHECK(report && known);
      if (!report || !report->ok) continue;
      CHECK(std::ranges::all_of(results_[node], [](float value) { return value == kMean; }));
      ++succeeded;
    }
    return succeeded;
  }

  // A buffer of another length than the node's part is refused.
  bool takes(OpId op, std::uint32_t node, std::size_t result_bytes) {
    return engines_[node]
        ->start(plan_of(ports_, op, node),
                reinterpret_cast<const std::uint8_t*>(contributions_[node].data()),
                4 * contributions_[node].size(),
                reinterpret_cast<std::uint8_t*>(results_[node].data()), result_bytes, Seconds(60))
        .ok();
  }

 private:
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::uint16_t> ports_;
  std::vector<Vector> contributions_;
  std::vector<Vector> results_;
};

void every_rank_gets_its_part() {
  Crew crew;
  for (std::uint64_t round = 0; round < 5; ++round) {
    crew.start({1, round, 0, 0});
    CHECK(crew.finish({1, round, 0, 0}) == kNodes.size());
  }
  CHECK(!crew.takes({1, 9, 0, 0}, 1, 4 * part_of(1) - 4));
  CHECK(!crew.takes({1, 9, 0, 0}, 1, 4 * static_cast<std::size_t>(kBoundaries.back())));
}

void what_an_attempt_left_is_used_at_its_right_place() {
  std::mt19937 random(17);
  Crew crew;
  for (std::uint64_t round = 0; round < 12; ++round) {
    crew.start({1, round, 0, 0});
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    crew.abort({1, round, 0, 0});
    crew.finish({1, round, 0, 0});
    crew.start({1, round, 0, 1});
    CHECK(crew.finish({1, round, 0, 1}) == kNodes.size());
  }
}

void a_plan_is_checked_against_what_the_buffers_hold() {
  const std::vector<std::uint16_t> ports(kNodes.size(), 1);
  Layout layout, other;
  Plan plan = plan_of(ports, {1, 0, 0, 0}, 4);
  CHECK(check_plan(plan, kNodes[4], &layout).ok());
  CHECK(layout.buffer_bytes == 4 * part_of(4));
  CHECK(layout.num_partners == 3);
  // What one node's buffers hold is not the others' affair; the order is.
  CHECK(check_plan(plan_of(ports, {1, 0, 0, 0}, 2), kNodes[2], &other).ok());
  CHECK(layout.digest == other.digest && layout.grid_key == other.grid_key);
  plan.order = 8;
  CHECK(check_plan(plan, kNodes[4], &other).ok());
  CHECK(layout.digest != other.digest && layout.grid_key != other.grid_key);
  // A chunk that passes a node must have a place there.
  *std::ranges::find(plan.held, true) = false;
  CHECK(!check_plan(plan, kNodes[4], &layout).ok());
  plan.held.resize(3);
  CHECK(!check_plan(plan, kNodes[4], &layout).ok());
}

}  // namespace

int main() {
  every_rank_gets_its_part();
  what_an_attempt_left_is_used_at_its_right_place();
  a_plan_is_checked_against_what_the_buffers_hold();
  return atoll_test::failures() == 0 ? 0 : 1;
}
