// Short measurements of links without an op: frames whose payload the other end drops and answers.
// They wait while an op runs here, an op that begins ends them, and a node that is in an op answers
// none: only spare time is measured. What is still on the way then is little, for as much is sent as
// answers say that the way takes.
//
// Owner: the Engine. Threads: the loop's, except measure(), which blocks any other. Failure: each
// result says why it is none.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/clock.h"
#include "engine/connections.h"
#include "engine/link.h"
#include "engine/loop.h"
#include "engine/plan.h"

namespace atoll_core::engine {

struct ProbeResult {
  double bytes_per_s = 0.0;
  double rtt_s = 0.0;
  std::string failure;  // empty: it worked
};

class Probes {
 public:
  Probes(Loop& loop, Connections& connections) : loop_(loop), connections_(connections) {}
  Probes(const Probes&) = delete;
  Probes& operator=(const Probes&) = delete;

  // Sends `bytes` to each node and waits for the answers, at most until the deadline; results in
  // the order of the nodes. From any thread but the loop's.
  std::vector<ProbeResult> measure(const std::vector<Node>& nodes, unsigned connections,
                                   std::uint64_t bytes, Seconds deadline);
  // No more results; wakes whoever waits. From any thread.
  void close();

  // ---- the loop's ----
  std::optional<Outgoing> next(const Link& link);
  void answered(const Link& link, const Frame& frame);
  void lost(const NodeName& node, const std::string& reason);
  void op_began();
  bool needs(const NodeName& node) const { return running_.contains(node); }
  bool empty() const { return running_.empty(); }
  void on_tick(Time now);

 private:
  // One measure() call: its thread waits, the loop fills.
  struct Call {
    std::vector<ProbeResult> results;
    std::size_t open = 0;
  };
  // Towards one node.
  struct Probe {
    std::shared_ptr<Call> call;
    std::size_t index = 0;
    std::uint64_t id = 0;
    std::uint32_t frames = 0;
    std::uint32_t sent = 0;
    Time expires_at{};
    std::vector<Time> answers;  // when they came
  };

  void begin(const std::vector<Node>& nodes, unsigned connections, std::uint32_t frames,
             Time expires_at, const std::shared_ptr<Call>& call);
  void end(const NodeName& node, ProbeResult result);
  ProbeResult rate_of(const NodeName& node, const Probe& probe) const;

  Loop& loop_;
  Connections& connections_;
  std::map<NodeName, Probe> running_;  // the loop's
  std::uint64_t next_id_ = 1;          // likewise
  std::mutex mutex_;                   // of all Calls
  std::condition_variable changed_;
  bool closed_ = false;
};

}  // namespace atoll_core::engine
