#include "engine/loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace atoll_core::engine {
namespace {

constexpr Token kWakeup = ~Token{0};

}  // namespace

Status Loop::open() {
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return system_error("creating an epoll", errno);
  wakeup_ = Fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wakeup_) return system_error("creating an eventfd", errno);
  return watch(wakeup_.get(), kWakeup, EPOLLIN);
}

void Loop::run(LoopClient& client) {
  std::array<epoll_event, 64> events;
  Time next_tick = Clock::now();
  while (!stopped_) {
    int timeout_ms = client.has_timed_work() ? static_cast<int>(kTick.count()) : -1;
    if (client.has_more_work()) timeout_ms = 0;
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == kWakeup) {
        run_posts();
      } else {
        client.on_event(events[i].data.u64, events[i].events);
      }
    }
    if (const Time now = Clock::now(); now >= next_tick) {
      client.on_tick(now);
      next_tick = now + kTick;
    }
    client.on_idle();
  }
}

void Loop::post(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  posts_.push_back(std::move(task));
  if (posts_.size() > 1) return;  // woken already
  const std::uint64_t one = 1;
  // Fails only if the counter is full, and then the loop wakes anyway.
  [[maybe_unused]] const ssize_t written = write(wakeup_.get(), &one, sizeof one);
}

void Loop::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  posts_.clear();
  wakeup_.reset();
  epoll_.reset();
}

void Loop::run_posts() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(wakeup_.get(), &count, sizeof count);
  std::vector<std::function<void()>> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(posts_);
  }
  for (const auto& task : tasks) task();
}

Status Loop::watch(int fd, Token token, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return success();
  return system_error("watching a socket", errno);
}

void Loop::rewatch(int fd, Token token, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::unwatch(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

}  // namespace atoll_core::engine
