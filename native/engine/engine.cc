#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "engine/connections.h"
#include "engine/look_ups.h"
#include "engine/loop.h"
#include "engine/pool.h"
#include "engine/transfers.h"

namespace atoll_core::engine {
namespace {

constexpr const char* kClosed = "the engine was closed";
constexpr std::uint64_t kOtherFds = 32;  // of this process, at the very least
constexpr Clock::duration kLinger = std::chrono::milliseconds(200);

Status random_number(std::uint64_t* out) {
  return random_bytes(reinterpret_cast<std::uint8_t*>(out), sizeof *out);
}

ConnectionsOptions connections_options(const Options& options) {
  const Seconds patience = std::min(options.connect_timeout, options.progress_timeout);
  return {options.max_up,
          options.max_down,
          to_duration(options.connect_timeout),
          to_duration(patience),
          {options.progress_timeout, options.buffer_bytes, options.congestion}};
}

Status check(const Options& options) {
  const std::string& peer = options.self.peer;
  if (peer.empty() || peer.size() > kMaxPeerBytes || peer.find('\0') != std::string::npos) {
    return bad_argument("a peer id has 1 to " + std::to_string(kMaxPeerBytes) + " bytes");
  }
  if (options.session_key.empty()) return bad_argument("the session key is empty");
  if (!(options.connect_timeout.count() > 0))
    return bad_argument("connect_timeout_s must be above 0");
  if (!(options.progress_timeout.count() > 0))
    return bad_argument("progress_timeout_s must be above 0");
  if (!(options.max_up >= 0) || !(options.max_down >= 0))
    return bad_argument("max_up_bytes_per_s and max_down_bytes_per_s must not be negative");
  if (options.buffer_bytes < 0) return bad_argument("buffer_bytes must not be negative");
  if (options.num_workers < 1 || options.num_workers > 256)
    return bad_argument("num_workers must be 1 to 256");
  return check_congestion(options.congestion);
}

// Refused here, in one line, rather than found out by sockets that cannot be had.
Status check_connections(std::size_t num_others, unsigned connections) {
  if (connections < 1 || connections > Connections::kMaxConnections) {
    return bad_argument("connections is " + std::to_string(connections) + "; it must be 1 to " +
                        std::to_string(Connections::kMaxConnections));
  }
  const std::uint64_t sockets = num_others * connections;
  const std::uint64_t limit = descriptor_limit();
  if (sockets + kOtherFds <= limit) return success();
  return bad_argument(std::to_string(connections) + " connections with each of " +
                      std::to_string(num_others) + " other nodes take " + std::to_string(sockets) +
                      " sockets; this process may open " + std::to_string(limit) +
                      " files (ulimit -n): raise it, or use fewer connections");
}

}  // namespace

// The parts, in the order in which they need each other, and the thread that runs them.
class Engine::Inner final : public LoopClient {
 public:
  Inner(const Options& options, Credentials credentials, std::unique_ptr<Tls> tls)
      : pool(options.num_workers),
        connections(loop, look_ups, counters, std::move(credentials), connections_options(options),
                    std::move(tls)),
        probes(loop, connections),
        reaching(loop, connections),
        transfers(loop, pool, registry, connections, probes, reaching, counters,
                  options.progress_timeout),
        self(options.self) {
    connections.serve(transfers, transfers);
  }

  Status open(const Options& options) {
    if (Status s = loop.open(); !s.ok()) return s;
    if (Status s = connections.listen(options.bind_host, options.port, &port); !s.ok()) return s;
    thread_ = std::thread([this] { loop.run(*this); });
    pthread_setname_np(thread_.native_handle(), "atoll-loop");
    return success();
  }

  // Only the first caller finds the thread; later ones wait until it is joined.
  void close() {
    std::lock_guard lock(closing_);
    probes.close();
    reaching.close();
    if (thread_.joinable()) {
      loop.post([this] {
        linger_until_ = Clock::now() + kLinger;
        closing_down_ = true;
      });
      thread_.join();
    }
    pool.close();
    look_ups.close();
    registry.close(kClosed);
    connections.close();
    loop.close();
  }

  void on_event(Token token, std::uint32_t events) override { connections.on_event(token, events); }
  void on_tick(Time now) override {
    connections.on_tick(now);
    transfers.on_tick(now);
    probes.on_tick(now);
    reaching.on_tick(now);
  }
  void on_idle() override {
    connections.flush();
    if (!closing_down_) return;
    transfers.abort_all(kClosed);
    const bool flushed = connections.all_sent() || Clock::now() >= linger_until_;
    if (flushed && transfers.empty()) loop.stop();
  }
  bool has_timed_work() const override {
    return closing_down_ || !transfers.empty() || !probes.empty() || !reaching.empty() ||
           connections.has_timed_work();
  }

  bool has_more_work() const override { return connections.has_more_work(); }

  Loop loop;
  Pool pool;
  LookUps look_ups;
  Registry registry;
  Counters counters;
  Connections connections;
  Probes probes;
  Reaching reaching;
  Transfers transfers;
  const NodeName self;
  std::uint16_t port = 0;

 private:
  std::mutex closing_;
  std::thread thread_;
  bool closing_down_ = false;  // the loop's, like linger_until_
  Time linger_until_;
};

Engine::Engine(std::unique_ptr<Inner> inner) : inner_(std::move(inner)) {}

Engine::~Engine() { close(); }

Status Engine::create(Options options, std::unique_ptr<Engine>* out) {
  if (Status s = check(options); !s.ok()) return s;
  Credentials credentials{options.run, options.self, options.session_key};
  if (Status s = random_number(&credentials.instance); !s.ok()) return s;
  std::unique_ptr<Tls> tls;
  if (options.tls.wanted()) {
    if (Status s = Tls::create(options.tls, &tls); !s.ok()) return s;
  }
  auto inner = std::make_unique<Inner>(options, std::move(credentials), std::move(tls));
  if (Status s = inner->open(options); !s.ok()) return s;
  out->reset(new Engine(std::move(inner)));
  return success();
}

std::uint16_t Engine::port() const { return inner_->port; }

void Engine::set_session_key(std::vector<std::uint8_t> key) {
  inner_->loop.post(
      [inner = inner_.get(), key = std::move(key)] { inner->connections.set_session_key(key); });
}

Status Engine::start(Plan plan, const std::uint8_t* contribution, std::size_t contribution_bytes,
                     std::uint8_t* result, std::size_t result_bytes, Seconds deadline) {
  Layout layout;
  if (Status s = check_plan(plan, inner_->self, &layout); !s.ok()) return s;
  if (Status s = check_connections(layout.num_partners, plan.connections); !s.ok()) return s;
  if (!(deadline.count() > 0)) return bad_argument("the deadline must be above 0 s");
  if (layout.contributes && contribution == nullptr)
    return bad_argument("this node is a source; give its contribution");
  const auto wrong = [&](const char* what, std::size_t bytes) {
    return bad_argument(std::string(what) + " has " + std::to_string(bytes) +
                        " bytes; the plan asks for " + std::to_string(layout.buffer_bytes));
  };
  if (contribution != nullptr && contribution_bytes != layout.buffer_bytes) {
    return wrong("the contribution", contribution_bytes);
  }
  if (result_bytes != layout.buffer_bytes) return wrong("the result", result_bytes);
  if (Status s = inner_->registry.admit(plan.op); !s.ok()) return s;
  inner_->loop.post([inner = inner_.get(), plan = std::move(plan), layout = std::move(layout),
                     buffers = Buffers{contribution, result}, deadline]() mutable {
    inner->transfers.start(std::move(plan), std::move(layout), buffers, deadline);
  });
  return success();
}

std::optional<Report> Engine::wait(const OpId& op, Seconds timeout, bool* known) {
  return inner_->registry.wait(op, timeout, known);
}

void Engine::abort(const OpId& op) {
  if (!inner_->registry.abort(op)) return;
  inner_->loop.post([inner = inner_.get(), op] { inner->transfers.abort(op); });
}

Status Engine::probe(const std::vector<Node>& nodes, unsigned connections, std::uint64_t bytes,
                     Seconds deadline, std::vector<ProbeResult>* out) {
  if (Status s = check_connections(nodes.size(), connections); !s.ok()) return s;
  if (bytes == 0 || !(deadline.count() > 0))
    return bad_argument("a probe needs bytes and a deadline above 0");
  for (const Node& node : nodes) {
    if (node.name == inner_->self) return bad_argument("a node cannot probe itself");
  }
  *out = inner_->probes.measure(nodes, connections, bytes, deadline);
  return success();
}

Status Engine::reach(const std::vector<Node>& nodes, Seconds deadline,
                     std::vector<ReachResult>* out) {
  if (Status s = check_connections(nodes.size(), 1); !s.ok()) return s;
  if (!(deadline.count() > 0)) return bad_argument("a trial needs a deadline above 0");
  for (const Node& node : nodes) {
    if (node.name == inner_->self) return bad_argument("a node cannot dial itself");
  }
  *out = inner_->reaching.try_all(nodes, deadline);
  return success();
}

Stats Engine::stats() const {
  const Counters& counters = inner_->counters;
  return {counters.sent_bytes,     counters.received_bytes, counters.connections,
          counters.dialled_links,  counters.accepted_links,
          counters.refused_hellos, counters.broken_links,   counters.dropped_frames,
          counters.open_fds};
}

void Engine::close() { inner_->close(); }

}  // namespace atoll_core::engine
