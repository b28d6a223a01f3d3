#include "engine/pool.h"

#include <pthread.h>

#include <utility>

namespace atoll_core::engine {

Pool::Pool(unsigned num_workers) {
  for (unsigned i = 0; i < num_workers; ++i) {
    threads_.emplace_back([this] { work(); });
    pthread_setname_np(threads_.back().native_handle(), "atoll-sum");
  }
}

Pool::~Pool() { close(); }

void Pool::submit(std::function<void()> job) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    jobs_.push_back(std::move(job));
  }
  changed_.notify_one();
}

void Pool::close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    jobs_.clear();
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Pool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
    if (closed_) return;
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

}  // namespace atoll_core::engine
