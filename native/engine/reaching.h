// Whether this node can dial others: a trial of each, whoever's turn it is to dial, and whatever
// links there are. Unlike a probe it moves no bytes but a hello's, so it waits for no op.
//
// Owner: the Engine. Threads: the loop's, except try_all(), which blocks any other. Failure: each
// result says why it is none.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/clock.h"
#include "engine/connections.h"
#include "engine/loop.h"
#include "engine/plan.h"

namespace atoll_core::engine {

struct ReachResult {
  std::string where;    // the address that answered, "10.0.0.1 port 7000"
  std::string failure;  // empty: it worked
};

class Reaching {
 public:
  Reaching(Loop& loop, Connections& connections) : loop_(loop), connections_(connections) {}
  Reaching(const Reaching&) = delete;
  Reaching& operator=(const Reaching&) = delete;

  // Dials all nodes at once; results in their order. At most until the deadline. From any thread
  // but the loop's.
  std::vector<ReachResult> try_all(const std::vector<Node>& nodes, Seconds deadline);
  // No more results; wakes whoever waits. From any thread.
  void close();

  // ---- the loop's ----
  void reached(const NodeName& node, const std::string& where) { end(node, {where, ""}); }
  void unreached(const NodeName& node, const std::string& reason) { end(node, {"", reason}); }
  bool needs(const NodeName& node) const { return trials_.contains(node); }
  bool empty() const { return trials_.empty(); }
  void on_tick(Time now);

 private:
  // One try_all() call: its thread waits, the loop fills.
  struct Call {
    std::vector<ReachResult> results;
    std::size_t open = 0;
  };
  struct Trial {
    std::shared_ptr<Call> call;
    std::size_t index = 0;
    Time expires_at{};
  };

  void begin(const std::vector<Node>& nodes, Time expires_at, const std::shared_ptr<Call>& call);
  void end(const NodeName& node, ReachResult result);

  Loop& loop_;
  Connections& connections_;
  std::map<NodeName, Trial> trials_;  // the loop's
  std::mutex mutex_;                  // of all Calls
  std::condition_variable changed_;
  bool closed_ = false;
};

}  // namespace atoll_core::engine
