// Which ops were ever begun, which still run, and how the others ended: what callers wait on.
//
// Owner: the Engine. Threads: any. Failure: admit() says why an id is refused.
// An id used once stays refused: the newest few thousand by name, everything older by a floor under
// them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/clock.h"
#include "engine/ids.h"
#include "engine/status.h"

namespace atoll_core::engine {

// What a directed link was seen to carry. Nodes by index of the op's plan; kAllNodes: all others
// together.
struct LinkRate {
  std::int64_t from = 0;
  std::int64_t to = 0;
  double bytes_per_s = 0.0;
  double rtt_s = 0.0;  // 0: not known
  double loss = 0.0;   // share of segments lost, queues apart; 0: none, or not known
};
inline constexpr std::int64_t kAllNodes = -1;

// How an op ended here. `broken` names links as (from, to), by node index of the op's plan.
struct Report {
  bool ok = false;
  std::string reason;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> broken;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  double wire_s = 0.0;          // from begin to end
  double encode_s = 0.0;        // spent by the pool on sums
  std::vector<LinkRate> links;  // seen from here
};

class Registry {
 public:
  static constexpr std::size_t kRemembered = 4096;

  // kBadArgument if `op` was used before, was aborted before it began, or all is closed.
  Status admit(const OpId& op);
  // The op, admitted before, has ended: wakes its waiter.
  void finish(const OpId& op, Report report);
  // Nothing is admitted any more; what still runs has ended for this reason.
  void close(const std::string& reason);
  // True if `op` runs; else it is remembered, and will be refused when it comes.
  bool abort(const OpId& op);
  // The op will never run here any more: it ended, was aborted, or is so old that it may have.
  bool over(const OpId& op) const;

  // Takes the report, or gives up after `timeout`. `known` is false for an op that neither runs nor
  // has a report.
  std::optional<Report> wait(const OpId& op, Seconds timeout, bool* known);

 private:
  bool used_locked(const OpId& op) const;
  void remember(const OpId& op);

  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::map<OpId, std::optional<Report>> live_;  // running, or ended and not yet asked for
  std::set<OpId> used_;
  std::set<OpId> aborted_early_;
  bool closed_ = false;
  std::optional<OpId> floor_;  // it and everything below are refused
};

}  // namespace atoll_core::engine
