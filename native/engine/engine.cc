#include "engine/engine.h"

#include <pthread.h>

#include <mutex>
#include <thread>
#include <utility>

#include "engine/connections.h"
#include "engine/loop.h"
#include "engine/pool.h"
#include "engine/transfers.h"

namespace atoll_core::engine {
namespace {

constexpr const char* kClosed = "the engine was closed";
constexpr Clock::duration kLinger = std::chrono::milliseconds(200);

Credentials credentials_of(const Options& options) {
  return {options.run, options.self, options.session_key};
}

Status check(const Options& options) {
  const std::string& peer = options.self.peer;
  if (peer.empty() || peer.size() > kMaxPeerBytes || peer.find('\0') != std::string::npos) {
    return bad_argument("a peer id has 1 to " + std::to_string(kMaxPeerBytes) + " bytes");
  }
  if (options.session_key.empty()) return bad_argument("the session key is empty");
  if (!(options.connect_timeout.count() > 0))
    return bad_argument("connect_timeout_s must be above 0");
  if (options.num_workers < 1 || options.num_workers > 256)
    return bad_argument("num_workers must be 1 to 256");
  return success();
}

}  // namespace

// The parts, in the order in which they need each other, and the thread that runs them.
class Engine::Inner final : public LoopClient {
 public:
  explicit Inner(const Options& options)
      : pool(options.num_workers),
        connections(loop, pool, counters, credentials_of(options), options.connect_timeout),
        transfers(loop, pool, registry, connections, counters, options.connect_timeout),
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
    if (thread_.joinable()) {
      loop.post([this] {
        linger_until_ = Clock::now() + kLinger;
        closing_down_ = true;
      });
      thread_.join();
    }
    pool.close();
    registry.close(kClosed);
    connections.close();
    loop.close();
  }

  void on_event(Token token, std::uint32_t events) override { connections.on_event(token, events); }
  void on_tick(Time now) override {
    connections.on_tick(now);
    transfers.on_tick(now);
  }
  void on_idle() override {
    connections.flush();
    if (!closing_down_) return;
    transfers.abort_all(kClosed);
    const bool flushed = connections.all_sent() || Clock::now() >= linger_until_;
    if (flushed && transfers.empty()) loop.stop();
  }
  bool has_timed_work() const override {
    return closing_down_ || !transfers.empty() || connections.has_timed_work();
  }

  Loop loop;
  Pool pool;
  Registry registry;
  Counters counters;
  Connections connections;
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
  auto inner = std::make_unique<Inner>(options);
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
  if (!(deadline.count() > 0)) return bad_argument("the deadline must be above 0 s");
  if (layout.contributes && contribution == nullptr)
    return bad_argument("this node is a source; give its contribution");
  const auto wrong = [&](const char* what, std::size_t bytes) {
    return bad_argument(std::string(what) + " has " + std::to_string(bytes) +
                        " bytes; the plan asks for " + std::to_string(layout.wire_bytes()));
  };
  if (contribution != nullptr && contribution_bytes != layout.wire_bytes()) {
    return wrong("the contribution", contribution_bytes);
  }
  if (result_bytes != layout.wire_bytes()) return wrong("the result", result_bytes);
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

Stats Engine::stats() const {
  const Counters& counters = inner_->counters;
  return {counters.sent_bytes,     counters.received_bytes, counters.connections,
          counters.refused_hellos, counters.dropped_frames, counters.open_fds};
}

void Engine::close() { inner_->close(); }

}  // namespace atoll_core::engine
