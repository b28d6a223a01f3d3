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
#include "engine/registry.h"
#include "engine/status.h"

namespace atoll_core::engine {

struct Options {
  std::string run;
  NodeName self;
  std::vector<std::uint8_t> session_key;
  std::string bind_host;
  std::uint16_t port = 0;     // 0: the system chooses
  Seconds connect_timeout{};  // for a connection and its hello; also how long a link may take no
                              // bytes from us
  unsigned num_workers = 1;
};

struct Stats {
  std::uint64_t sent_bytes = 0;  // at the sockets, hellos included, since the engine began
  std::uint64_t received_bytes = 0;
  std::uint64_t connections = 0;     // links that are up
  std::uint64_t refused_hellos = 0;  // accepted sockets that never proved themselves
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

  // Begins an op and returns at once. Both buffers hold layout.wire_bytes() bytes of `plan` and are
  // the engine's until wait() has given the op's report; `contribution` may be null for a node that
  // is no source. kBadArgument: a malformed plan, an op that was used or aborted before. Then
  // nothing has begun.
  Status start(Plan plan, const std::uint8_t* contribution, std::size_t contribution_bytes,
               std::uint8_t* result, std::size_t result_bytes, Seconds deadline);

  // Blocks until the op has ended, at most `timeout`. Nothing: it still runs (`known`) or there is
  // no such op. With the report the op is forgotten, its id stays refused, and no thread touches
  // its buffers any more.
  std::optional<Report> wait(const OpId& op, Seconds timeout, bool* known);

  // The op ends within 100 ms, not ok. If it has not begun, it never will.
  void abort(const OpId& op);

  Stats stats() const;

  // Ends all ops, sends what is queued (for a moment), closes all sockets, joins all threads.
  // Idempotent.
  void close();

 private:
  class Inner;
  explicit Engine(std::unique_ptr<Inner> inner);
  std::unique_ptr<Inner> inner_;
};

}  // namespace atoll_core::engine
