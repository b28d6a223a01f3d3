// A few threads that sum chunks, so that the loop never computes for long.
//
// Owner: the Engine, which creates and closes it. Threads: submit from any; jobs run on the pool's
// own. Failure: none; a job submitted after close() is dropped.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace atoll_core::engine {

class Pool {
 public:
  explicit Pool(unsigned num_workers);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void submit(std::function<void()> job);
  // Finishes what runs, drops what waits, joins. Idempotent.
  void close();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace atoll_core::engine
