// Looks up the names of hosts, each on a thread of its own as far as there are few: no name waits for
// another's name server, and nobody waits for a look-up to end.
//
// Owner: the Engine, which creates and closes it. Threads: every method from any; answers come on
// the look-ups' own. Nothing ends a look-up that hangs, so these threads are detached: what they
// touch is shared with them, and lives for as long. Failure: told as the answer.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/candidates.h"
#include "engine/status.h"

namespace atoll_core::engine {

class LookUps {
 public:
  static constexpr std::size_t kMostThreads = 16;
  // Must not block, nor call back.
  using Tell = std::function<void(const Status& status, const std::vector<Candidate>& found)>;

  LookUps() = default;
  ~LookUps() { close(); }
  LookUps(const LookUps&) = delete;
  LookUps& operator=(const LookUps&) = delete;

  // See find_candidates(). Does not block.
  void submit(std::string host, std::uint16_t port, Tell tell);
  // What waits is dropped, and so are answers to come. Waits for nothing but an answer that is just
  // told. Idempotent.
  void close();

 private:
  struct Job {
    std::string host;
    std::uint16_t port;
    Tell tell;
  };
  struct Shared {
    std::mutex mutex;
    bool closed = false;
    std::size_t threads = 0;
    std::deque<Job> jobs;
  };

  static void work(Shared& shared);

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace atoll_core::engine
