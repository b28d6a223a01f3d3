// The one event-loop thread of an engine. It alone touches sockets, links and the books of ops;
// others post to it.
//
// Owner: the Engine, which runs it in a thread of its own and joins that. Threads: post() from any,
// the rest from the loop's own (open() before it runs). Failure: open() gives kSystem.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "engine/clock.h"
#include "engine/socket.h"
#include "engine/status.h"

namespace atoll_core::engine {

// Events come with the token their descriptor was watched under, never with a pointer: what was
// closed is simply unknown by then.
using Token = std::uint64_t;

class LoopClient {
 public:
  virtual ~LoopClient() = default;
  virtual void on_event(Token token, std::uint32_t events) = 0;  // EPOLLIN, ...
  virtual void on_tick(Time now) = 0;  // every kTick, while has_timed_work()
  virtual void on_idle() = 0;          // after every batch of events and posts
  virtual bool has_timed_work() const = 0;
  virtual bool has_more_work() const = 0;  // at once, without an event
};

class Loop {
 public:
  static constexpr std::chrono::milliseconds kTick{10};

  Loop() = default;
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  Status open();
  // Returns after stop().
  void run(LoopClient& client);
  void stop() { stopped_ = true; }

  // A post to a closed loop is dropped.
  void post(std::function<void()> task);
  // After run() has returned: gives the descriptors back.
  void close();

  Status watch(int fd, Token token, std::uint32_t events);
  void rewatch(int fd, Token token, std::uint32_t events);
  void unwatch(int fd);

 private:
  void run_posts();

  Fd epoll_;
  Fd wakeup_;
  bool stopped_ = false;
  std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::function<void()>> posts_;
};

}  // namespace atoll_core::engine
