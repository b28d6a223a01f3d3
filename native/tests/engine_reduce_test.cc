// Whole engines over loopback, many ops, aborts and closings at random moments; meant for the
// sanitizers.
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

constexpr std::int64_t kNumel = 200'000;  // 800 kB in fp32, in chunks of 16 kB

NodeName name_of(std::uint32_t node) { return {std::string(1, static_cast<char>('a' + node)), 0}; }

std::unique_ptr<Engine> open(std::uint32_t node) {
  Options options;
  options.run = "run";
  options.self = name_of(node);
  options.session_key = {1, 2, 3};
  options.bind_host = "127.0.0.1";
  options.connect_timeout = options.progress_timeout = Seconds(20);
  options.num_workers = 2;
  std::unique_ptr<Engine> engine;
  CHECK(Engine::create(options, &engine).ok());
  return engine;
}

Plan plan_of(const std::vector<std::unique_ptr<Engine>>& engines, OpId op) {
  Plan plan;
  plan.op = op;
  plan.connections = 1 + op.round % 3;
  plan.boundaries = {0, kNumel};
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < engines.size(); ++i) {
    plan.nodes.push_back({name_of(i), "127.0.0.1", engines[i]->port(), i + 1});
    all.push_back(i);
  }
  for (const std::uint32_t root : all) {
    plan.lanes.push_back(
        star(root, all, std::vector<std::uint64_t>(all.size(), 1), all, all.size()));
  }
  for (std::int64_t start = 0; start < kNumel; start += 4096) {
    plan.chunk_starts.push_back(start);
    plan.chunk_lanes.push_back((start / 4096) % static_cast<std::int64_t>(engines.size()));
  }
  plan.chunk_starts.push_back(kNumel);
  return plan;
}

using Vector = std::vector<std::uint8_t>;

Vector full_of(float value) {
  Vector bytes(4 * kNumel);
  for (std::size_t at = 0; at < bytes.size(); at += 4) std::memcpy(bytes.data() + at, &value, 4);
  return bytes;
}

// One op on all engines; node i contributes 2^i.
struct Running {
  Running(const std::vector<std::unique_ptr<Engine>>& engines, OpId id) : op(id) {
    for (std::uint32_t i = 0; i < engines.size(); ++i) {
      contributions.push_back(full_of(static_cast<float>(1u << i)));
      results.emplace_back(4 * kNumel);
    }
    for (std::uint32_t i = 0; i < engines.size(); ++i) {
      CHECK(engines[i]
                ->start(plan_of(engines, op), contributions[i].data(), contributions[i].size(),
                        results[i].data(), results[i].size(), Seconds(60))
                .ok());
    }
  }

  // Whatever happened, the buffers are ours again: scribble, so that a late reader or writer is
  // found.
  std::size_t finish(const std::vector<std::unique_ptr<Engine>>& engines) {
    const float mean =
        static_cast<float>((1u << engines.size()) - 1) / static_cast<float>(engines.size());
    std::size_t succeeded = 0;
    for (std::size_t i = 0; i < engines.size(); ++i) {
      bool known = false;
      const auto report = engines[i]->wait(op, Seconds(90), &known);
      CHECK(report && known);
      if (report && report->ok) {
        CHECK(results[i] == full_of(mean));
        ++succeeded;
      }
      std::memset(contributions[i].data(), 0xff, contributions[i].size());
      std::memset(results[i].data(), 0xff, results[i].size());
    }
    return succeeded;
  }

  OpId op;
  std::vector<Vector> contributions;
  std::vector<Vector> results;
};

std::vector<std::unique_ptr<Engine>> open_all(std::uint32_t world) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (std::uint32_t i = 0; i < world; ++i) engines.push_back(open(i));
  return engines;
}

void several_ops_in_flight_are_exact() {
  const auto engines = open_all(3);
  for (std::uint64_t round = 0; round < 4; ++round) {
    std::vector<std::unique_ptr<Running>> running;
    for (std::uint32_t fragment = 0; fragment < 3; ++fragment) {
      running.push_back(std::make_unique<Running>(engines, OpId{1, round, fragment, 0}));
    }
    for (auto& one : running) CHECK(one->finish(engines) == engines.size());
  }
}

// An abort on some members must never spoil another op, nor touch the buffers afterwards.
void aborts_at_random_moments_spoil_nothing() {
  std::mt19937 random(7);
  const auto engines = open_all(3);
  for (std::uint64_t round = 0; round < 12; ++round) {
    Running doomed(engines, {1, round, 0, 0});
    Running healthy(engines, {1, round, 1, 0});
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    for (const auto& engine : engines) engine->abort(doomed.op);
    doomed.finish(engines);
    CHECK(healthy.finish(engines) == engines.size());
  }
}

void closing_at_random_moments_ends_all_waits() {
  std::mt19937 random(8);
  for (int i = 0; i < 6; ++i) {
    auto engines = open_all(3);
    Running running(engines, {1, 0, 0, 0});
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    engines[random() % 3]->close();
    // A survivor may miss only what another survivor, who gave up, will not send: that is for the
    // coordinator.
    for (const auto& engine : engines) engine->abort(running.op);
    running.finish(engines);
  }
}

}  // namespace

int main() {
  several_ops_in_flight_are_exact();
  aborts_at_random_moments_spoil_nothing();
  closing_at_random_moments_ends_all_waits();
  return atoll_test::failures() == 0 ? 0 : 1;
}
