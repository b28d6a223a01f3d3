// Peers that are advertised by name, where name servers hang: nobody waits for another's.
//
// The resolver is the one below: names that begin with "hang" are answered when released.
#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/look_ups.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

constexpr std::chrono::seconds kGuard{30};  // a test that would wait for ever fails instead

class Resolver {
 public:
  // Blocks the look-up of a name until release().
  void hang(const std::string& name) {
    std::unique_lock lock(mutex_);
    const auto released = released_;
    hanging_.insert(name);
    most_ = std::max(most_, hanging_.size());
    changed_.notify_all();
    changed_.wait_for(lock, kGuard, [&] { return released_ != released; });
    hanging_.erase(name);
    changed_.notify_all();
  }
  // Waits until so many look-ups hang.
  bool await(std::size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kGuard, [&] { return hanging_.size() == count; });
  }
  std::size_t hanging() {
    std::lock_guard lock(mutex_);
    return hanging_.size();
  }
  std::size_t most() {
    std::lock_guard lock(mutex_);
    return most_;
  }
  void release() {
    {
      std::lock_guard lock(mutex_);
      ++released_;
      most_ = 0;
    }
    changed_.notify_all();
  }
  void finish() {
    release();
    CHECK(await(0));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::multiset<std::string> hanging_;
  std::size_t most_ = 0;
  unsigned released_ = 0;
};

// Never destroyed: detached threads may still leave it as the process ends.
Resolver& resolver() {
  static auto& it = *new Resolver;
  return it;
}

}  // namespace

extern "C" int getaddrinfo(const char* host, const char* port, const addrinfo* hints,
                           addrinfo** out) {
  static const auto next = reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const std::string name = host == nullptr ? "" : host;
  if (!name.ends_with(".test") || (hints->ai_flags & AI_NUMERICHOST) != 0)
    return next(host, port, hints, out);
  if (name.starts_with("hang")) resolver().hang(name);
  return name.starts_with("no.") ? EAI_NONAME : next("127.0.0.1", port, hints, out);
}

namespace {

std::unique_ptr<Engine> open(const std::string& peer) {
  Options options;
  options.run = "run";
  options.self = {peer, 0};
  options.session_key = {1, 2, 3};
  options.bind_host = "127.0.0.1";
  options.connect_timeout = options.progress_timeout = Seconds(20);
  std::unique_ptr<Engine> engine;
  CHECK(Engine::create(options, &engine).ok());
  return engine;
}

// It takes connections, or none, and says nothing on them.
struct Quiet {
  explicit Quiet(bool listens) {
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0);
    if (listens) CHECK(listen(fd, 64) == 0);
    socklen_t size = sizeof at;
    CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0);
    port = ntohs(at.sin_port);
  }
  ~Quiet() { ::close(fd); }
  std::string text() const { return "127.0.0.1:" + std::to_string(port); }
  int fd = -1;
  std::uint16_t port = 0;
};

Node node(const std::string& peer, const std::string& hosts, std::uint16_t port) {
  Node out;
  out.name.peer = peer;
  out.host = hosts;
  out.port = port;
  return out;
}

std::vector<ReachResult> reach(Engine& from, const std::vector<Node>& nodes, double deadline_s = 10) {
  std::vector<ReachResult> results;
  CHECK(from.reach(nodes, Seconds(deadline_s), &results).ok());
  CHECK(results.size() == nodes.size());
  return results;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string port_text(const Engine& engine) { return " port " + std::to_string(engine.port()); }

void numbers_do_not_wait_for_names() {
  const auto a = open("a"), b = open("b");
  const auto found = reach(*a, {node("b", "hang.test,127.0.0.1", b->port())});
  CHECK(found[0].where == "127.0.0.1" + port_text(*b));
  CHECK(resolver().await(1));
  resolver().finish();
}

void a_name_joins_the_race_of_the_numbers() {
  const auto a = open("a"), b = open("b");
  const Quiet silent(true), closed(false);
  const auto found = reach(
      *a, {node("b", closed.text() + "," + silent.text() + ",b.test", b->port())});
  CHECK(found[0].where == "b.test" + port_text(*b));
}

// All numbers have failed by then: it is tried all the same, within the same trial.
void a_name_that_is_found_late_is_dialled() {
  const auto a = open("a"), b = open("b");
  const Quiet closed(false);
  std::string where;
  std::thread waiting([&] {
    where = reach(*a, {node("b", closed.text() + ",hang.test", b->port())}, 25)[0].where;
  });
  CHECK(resolver().await(1));
  resolver().finish();
  waiting.join();
  CHECK(where == "hang.test" + port_text(*b));
}

void a_dead_name_server_is_its_own_peers_affair() {
  const auto a = open("a"), c = open("c");
  const auto found =
      reach(*a, {node("b", "hang.test", 1), node("c", "c.test", c->port())}, 2.0);
  CHECK(found[0].failure == "the name of hang.test is not found yet");
  CHECK(found[1].where == "c.test" + port_text(*c));
  CHECK(resolver().await(1));
  resolver().finish();
}

void a_dead_name_does_not_hold_up_the_peers_other_name() {
  const auto a = open("a"), b = open("b");
  CHECK(reach(*a, {node("b", "hang.test,b.test", b->port())})[0].where == "b.test" + port_text(*b));
  resolver().finish();
}

void who_has_moved_does_not_wait_for_the_old_name() {
  const auto a = open("a"), b = open("b");
  CHECK(!reach(*a, {node("b", "hang.test", 1)}, 0.2)[0].failure.empty());
  CHECK(reach(*a, {node("b", "b.test", b->port())})[0].where == "b.test" + port_text(*b));
  CHECK(resolver().await(1));
  resolver().finish();
}

void what_failed_is_said_of_names_and_numbers() {
  const auto a = open("a");
  const Quiet closed(false);
  const auto found = reach(
      *a, {node("b", "no.b.test," + closed.text(), 1), node("c", "no.c.test,no.d.test:9", 1)});
  CHECK(has(found[0].failure, "could not connect to no.b.test: "));
  CHECK(has(found[0].failure, "could not connect to 127.0.0.1 port " + std::to_string(closed.port)));
  CHECK(has(found[1].failure, "could not connect to no.c.test: "));
  CHECK(has(found[1].failure, "could not connect to no.d.test:9: "));
}

// What the name server said once is not the last word.
void a_name_that_failed_is_looked_up_again() {
  const auto a = open("a");
  const Quiet closed(false);
  const std::vector<Node> nodes = {node("b", "hang.b.test," + closed.text(), 1)};
  CHECK(has(reach(*a, nodes, 0.5)[0].failure, "the name of hang.b.test is not found yet"));
  CHECK(resolver().await(1));
  resolver().finish();
  const std::vector<Node> wrong = {node("c", "no.c.test", 1)};
  for (int i = 0; i < 2; ++i)
    CHECK(has(reach(*a, wrong)[0].failure, "could not connect to no.c.test: "));
}

void closing_waits_for_no_name_server() {
  const auto a = open("a");
  CHECK(!reach(*a, {node("b", "hang.test", 1)}, 0.2)[0].failure.empty());
  CHECK(resolver().await(1));
  a->close();
  CHECK(resolver().hanging() == 1);  // it was closed meanwhile, not afterwards
  resolver().finish();
}

// More look-ups than there may be threads: the others have their turn, and all are answered.
void there_are_few_threads() {
  constexpr std::size_t kNames = LookUps::kMostThreads + 5;
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t told = 0;
  LookUps look_ups;
  for (std::size_t i = 0; i < kNames; ++i) {
    look_ups.submit("hang" + std::to_string(i) + ".test", 7,
                    [&](const Status& status, const std::vector<Candidate>& found) {
                      CHECK(status.ok() && found.size() == 1);
                      std::lock_guard lock(mutex);
                      ++told;
                      changed.notify_all();
                    });
  }
  CHECK(resolver().await(LookUps::kMostThreads));
  CHECK(resolver().most() == LookUps::kMostThreads);
  std::unique_lock lock(mutex);
  const auto until = std::chrono::steady_clock::now() + kGuard;
  while (told < kNames && std::chrono::steady_clock::now() < until) {
    lock.unlock();
    resolver().release();
    lock.lock();
    changed.wait_for(lock, std::chrono::milliseconds(20));
  }
  CHECK(told == kNames);
}

void nothing_is_told_after_closing() {
  const auto told = std::make_shared<std::atomic<int>>(0);
  {
    LookUps look_ups;
    for (std::size_t i = 0; i < LookUps::kMostThreads + 5; ++i) {
      look_ups.submit("hang.test", 7, [told](const Status&, const std::vector<Candidate>&) { ++*told; });
    }
    CHECK(resolver().await(LookUps::kMostThreads));
  }
  resolver().finish();
  const auto until = std::chrono::steady_clock::now() + kGuard;
  while (told.use_count() > 1 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(told.use_count() == 1);  // all look-ups are over, and what waited was dropped
  CHECK(*told == 0);
}

}  // namespace

int main() {
  numbers_do_not_wait_for_names();
  a_name_joins_the_race_of_the_numbers();
  a_name_that_is_found_late_is_dialled();
  a_dead_name_server_is_its_own_peers_affair();
  a_dead_name_does_not_hold_up_the_peers_other_name();
  who_has_moved_does_not_wait_for_the_old_name();
  what_failed_is_said_of_names_and_numbers();
  a_name_that_failed_is_looked_up_again();
  closing_waits_for_no_name_server();
  there_are_few_threads();
  nothing_is_told_after_closing();
  return atoll_test::failures() == 0 ? 0 : 1;
}
