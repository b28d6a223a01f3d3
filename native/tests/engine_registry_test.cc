// Which op ids are refused, and what waiters see.
#include <thread>

#include "engine/registry.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

void an_id_serves_once() {
  Registry registry;
  CHECK(registry.admit({1, 0, 0, 0}).ok());
  CHECK(!registry.admit({1, 0, 0, 0}).ok());
  CHECK(!registry.over({1, 0, 0, 0}));
  Report report;
  report.ok = true;
  registry.finish({1, 0, 0, 0}, report);
  bool known = false;
  CHECK(registry.wait({1, 0, 0, 0}, Seconds(0), &known)->ok);
  CHECK(known);
  CHECK(!registry.wait({1, 0, 0, 0}, Seconds(0), &known) && !known);
  CHECK(registry.over({1, 0, 0, 0}));
  CHECK(!registry.admit({1, 0, 0, 0}).ok());
  CHECK(registry.admit({1, 0, 0, 1}).ok());
}

void memory_is_bounded_and_old_ids_stay_refused() {
  Registry registry;
  bool known = false;
  for (std::uint64_t round = 0; round < 3 * Registry::kRemembered; ++round) {
    CHECK(registry.admit({2, round, 0, 0}).ok());
    registry.finish({2, round, 0, 0}, {});
    CHECK(registry.wait({2, round, 0, 0}, Seconds(0), &known).has_value());
  }
  CHECK(!registry.admit({2, 0, 0, 0}).ok());
  CHECK(!registry.admit({1, 999999, 0, 0}).ok());  // an older term
  CHECK(!registry.admit({2, 2 * Registry::kRemembered + 5, 0, 0}).ok());
  CHECK(registry.admit({2, 3 * Registry::kRemembered, 0, 0}).ok());
}

void an_early_abort_is_remembered() {
  Registry registry;
  CHECK(!registry.abort({1, 5, 0, 0}));
  CHECK(!registry.admit({1, 5, 0, 0}).ok());
  CHECK(registry.admit({1, 5, 0, 1}).ok());
  CHECK(registry.abort({1, 5, 0, 1}));
}

void closing_wakes_waiters() {
  Registry registry;
  CHECK(registry.admit({1, 0, 0, 0}).ok());
  std::optional<Report> report;
  std::thread waiter([&] {
    bool known = false;
    report = registry.wait({1, 0, 0, 0}, Seconds(30), &known);
  });
  registry.close("closed");
  waiter.join();
  CHECK(report && !report->ok && report->reason == "closed");
  CHECK(!registry.admit({1, 1, 0, 0}).ok());
}

}  // namespace

int main() {
  an_id_serves_once();
  memory_is_bounded_and_old_ids_stay_refused();
  an_early_abort_is_remembered();
  closing_wakes_waiters();
  return atoll_test::failures() == 0 ? 0 : 1;
}
