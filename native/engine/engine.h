// One rank's end of the collective: it reduces encoded vectors over the nodes of a plan.
//
// Owner: whoever created it. Threads: every method from any thread. It owns one event-loop thread
// and a few workers; close() joins them. Failure: Status or Report; no exceptions. A failed op
// leaves the engine usable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/clock.h"
#include "engine/plan.h"
#include "engine/probes.h"
#include "engine/reaching.h"
#include "engine/registry.h"
#include "engine/status.h"
#include "engine/tls.h"

namespace atoll_core::engine {

struct Options {
  std::string run;
  NodeName self;
  std::vector<std::uint8_t> session_key;
  std::string bind_host;
  std::uint16_t port = 0;         // 0: the system chooses
  Seconds connect_timeout{};      // for a connection and its hello
  Seconds progress_timeout{5.0};  // a node from which nothing came for so long is lost to an op
  unsigned num_workers = 1;
  std::string congestion;  // the sockets' congestion control; empty: the system's
  int buffer_bytes = 0;    // of every socket; 0: the system tunes them
  // Over all links together, in bytes per second; 0: no limit.
  double max_up = 0.0;
  double max_down = 0.0;
  TlsOptions tls;  // without certificates: plain TCP
};

struct Stats {
  std::uint64_t sent_bytes = 0;  // at the sockets, hellos included, since the engine began
  std::uint64_t received_bytes = 0;
  std::uint64_t connections = 0;     // links that are up
  std::uint64_t dialled_links = 0;   // that ever came up, by who dialled
  std::uint64_t accepted_links = 0;
  std::uint64_t refused_hellos = 0;  // accepted sockets that never proved themselves
  std::uint64_t broken_links = 0;    // links that were lost
  std::uint64_t dropped_frames = 0;  // for ops that are unknown, over, or under another plan
  std::uint64_t open_fds = 0;
};

class Engine {
 public:
  // kSystem: the address cannot be had. kBadArgument: malformed options.
  static Status create(Options options, std::unique_ptr<Engine>* out);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::uint16_t port() const;
  // For connections to come; those that are up stay.
  void set_session_key(std::vector<std::uint8_t> key);

  // Begins an op and returns at once. Both buffers hold the chunks of `plan.held`, one after the
  // other, and are the engine's until wait() has given the op's report; `contribution` may be null
  // for a node that is no source. kBadArgument: a malformed plan, an op that was used or aborted before, more
  // connections than this process may have. Then nothing has begun.
  Status start(Plan plan, const std::uint8_t* contribution, std::size_t contribution_bytes,
               std::uint8_t* result, std::size_t result_bytes, Seconds deadline);

  // Blocks until the op has ended, at most `timeout`. Nothing: it still runs (`known`) or there is
  // no such op. With the report the op is forgotten, its id stays refused, and no thread touches
  // its buffers any more.
  std::optional<Report> wait(const OpId& op, Seconds timeout, bool* known);

  // The op ends within 100 ms, not ok. If it has not begun, it never will.
  void abort(const OpId& op);

  // Measures the links to each node by sending it so many bytes, in time that no op needs; blocks
  // until all is known, at most `deadline`. kBadArgument: a deadline or bytes of 0, this node
  // itself.
  Status probe(const std::vector<Node>& nodes, unsigned connections, std::uint64_t bytes,
               Seconds deadline, std::vector<ProbeResult>* out);

  // Dials each node, whoever's turn it is, and tells whether its hello came, and where; blocks at
  // most `deadline`. Links that come of it stay. kBadArgument: a deadline of 0, this node itself.
  Status reach(const std::vector<Node>& nodes, Seconds deadline, std::vector<ReachResult>* out);

  Stats stats() const;

  // Ends all ops, sends what is queued (for a moment), closes all sockets, joins all threads but
  // those that look up a name: they end by themselves, and their answers are dropped. Idempotent.
  void close();

 private:
  class Inner;
  explicit Engine(std::unique_ptr<Inner> inner);
  std::unique_ptr<Inner> inner_;
};

}  // namespace atoll_core::engine
