#include "engine/look_ups.h"

#include <pthread.h>

#include <system_error>
#include <thread>
#include <utility>

namespace atoll_core::engine {

void LookUps::submit(std::string host, std::uint16_t port, Tell tell) {
  std::lock_guard lock(shared_->mutex);
  if (shared_->closed) return;
  shared_->jobs.push_back({std::move(host), port, std::move(tell)});
  if (shared_->threads >= kMostThreads) return;
  try {
    std::thread([shared = shared_] { work(*shared); }).detach();
    ++shared_->threads;
  } catch (const std::system_error& error) {
    if (shared_->threads > 0) return;  // one of these takes it
    const Job job = std::move(shared_->jobs.back());
    shared_->jobs.pop_back();
    job.tell(system_error("starting a thread to look up " + job.host, error.code().value()), {});
  }
}

void LookUps::close() {
  std::lock_guard lock(shared_->mutex);
  shared_->closed = true;
  shared_->jobs.clear();
}

void LookUps::work(Shared& shared) {
  pthread_setname_np(pthread_self(), "atoll-names");
  std::unique_lock lock(shared.mutex);
  while (!shared.closed && !shared.jobs.empty()) {
    const Job job = std::move(shared.jobs.front());
    shared.jobs.pop_front();
    lock.unlock();
    std::vector<Candidate> found;
    const Status status = find_candidates(job.host, job.port, &found);
    lock.lock();
    if (!shared.closed) job.tell(status, found);
  }
  --shared.threads;
}

}  // namespace atoll_core::engine
