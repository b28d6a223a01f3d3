// Dialling over loopback: several addresses at once, a refusal that is not the last word, and
// trials of whom this node can dial.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/candidates.h"
#include "engine/engine.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

std::unique_ptr<Engine> open(const std::string& peer, const std::string& host = "127.0.0.1") {
  Options options;
  options.run = "run";
  options.self = {peer, 0};
  options.session_key = {1, 2, 3};
  options.bind_host = host;
  options.connect_timeout = options.progress_timeout = Seconds(20);
  std::unique_ptr<Engine> engine;
  CHECK(Engine::create(options, &engine).ok());
  return engine;
}

// A listening socket that never answers: its backlog takes the connection, nobody reads.
struct Silent {
  Silent() {
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0);
    CHECK(listen(fd, 64) == 0);
    socklen_t size = sizeof at;
    CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0);
    port = ntohs(at.sin_port);
  }
  ~Silent() { ::close(fd); }
  int fd = -1;
  std::uint16_t port = 0;
};

// A port at which nobody listens.
std::uint16_t closed_port() { return Silent().port; }

std::string at(std::uint16_t port) { return "127.0.0.1:" + std::to_string(port); }

using Nodes = std::vector<Node>;

void add(Nodes& nodes, const std::string& peer, const std::string& hosts, std::uint16_t port) {
  Node node;
  node.name.peer = peer;
  node.host = hosts;
  node.port = port;
  nodes.push_back(std::move(node));
}

ReachResult reach(Engine& from, const std::string& peer, const std::string& hosts,
                  std::uint16_t port, double deadline_s = 10) {
  std::vector<ReachResult> results;
  Nodes nodes;
  add(nodes, peer, hosts, port);
  CHECK(from.reach(nodes, Seconds(deadline_s), &results).ok());
  CHECK(results.size() == 1);
  return results.front();
}

// How many links it has accepted once it has heard of them: the dialling end is through first.
std::uint64_t accepted(const Engine& engine, std::uint64_t expected) {
  for (int i = 0; i < 1000 && engine.stats().accepted_links < expected; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return engine.stats().accepted_links;
}

std::vector<std::string> texts(const std::string& hosts, bool numeric_only = true) {
  std::vector<Candidate> found;
  std::vector<std::string> others;
  if (numeric_only) {
    numeric_candidates(hosts, 7, &found, &others);
  } else if (!find_candidates(hosts, 7, &found).ok()) {
    return {"failed"};
  }
  std::vector<std::string> out;
  for (const Candidate& each : found) out.push_back(each.text);
  for (const std::string& each : others) out.push_back("not " + each);
  return out;
}

void hosts_are_read() {
  using Texts = std::vector<std::string>;
  CHECK(texts("10.0.0.1") == Texts({"10.0.0.1 port 7"}));
  CHECK(texts("10.0.0.1,10.0.0.2:9") == Texts({"10.0.0.1 port 7", "10.0.0.2 port 9"}));
  CHECK(texts("[::1]:9,::1,[::2]") == Texts({"::1 port 9", "::1 port 7", "::2 port 7"}));
  CHECK(texts("10.0.0.1,10.0.0.1") == Texts({"10.0.0.1 port 7"}));
  CHECK(texts("10.0.0.1:x") == Texts({"not 10.0.0.1:x"}));
  CHECK(texts("10.0.0.1:x", false) == Texts({"failed"}));
  CHECK(texts("[::1") == Texts({"not [::1"}));
  CHECK(texts("some.name,10.0.0.1,a.name:9") == Texts({"10.0.0.1 port 7", "not some.name", "not a.name:9"}));
  CHECK(texts("no.such.invalid,10.0.0.1", false) == Texts({"10.0.0.1 port 7"}));
  std::string many;
  for (int i = 1; i < 30; ++i) many += (i > 1 ? ",10.0.0." : "10.0.0.") + std::to_string(i);
  CHECK(texts(many).size() == kMostCandidates);
}

// A silent address costs the head start, not a timeout; the next dial begins with what answered.
void the_first_address_that_says_the_right_hello_is_kept() {
  const auto a = open("a"), b = open("b");
  const Silent silent;
  const std::string hosts = at(silent.port) + "," + at(closed_port()) + "," + at(b->port());
  const auto begun = std::chrono::steady_clock::now();
  const ReachResult found = reach(*a, "b", hosts, 1);
  const auto took = std::chrono::steady_clock::now() - begun;
  CHECK(found.failure.empty());
  CHECK(found.where == "127.0.0.1 port " + std::to_string(b->port()));
  CHECK(took >= std::chrono::milliseconds(200));  // the head start of the silent one
  CHECK(took < std::chrono::seconds(15));         // its timeout is 20 s
  CHECK(a->stats().dialled_links == 1 && a->stats().accepted_links == 0);
  CHECK(b->stats().dialled_links == 0 && accepted(*b, 1) == 1);
  CHECK(reach(*a, "b", hosts, 1).where == found.where);
  CHECK(a->stats().dialled_links == 2);
}

// Another node's engine answers at the first address: that is not the one that was meant.
void another_node_at_an_address_is_passed_over() {
  const auto a = open("a"), b = open("b"), c = open("c");
  const ReachResult found = reach(*a, "b", at(c->port()) + "," + at(b->port()), 1);
  CHECK(found.where == "127.0.0.1 port " + std::to_string(b->port()));
  CHECK(c->stats().accepted_links == 0);
}

void what_failed_is_named_address_by_address() {
  const auto a = open("a");
  const Silent silent;
  const std::uint16_t closed = closed_port();
  const ReachResult found = reach(*a, "b", at(closed) + "," + at(silent.port), 1, 1.0);
  CHECK(found.where.empty());
  CHECK(found.failure.find("port " + std::to_string(closed) + ": ") != std::string::npos);
  CHECK(found.failure.find("no answer from 127.0.0.1 port " + std::to_string(silent.port)) !=
        std::string::npos);
}

// The trial of a node that is there already, and of several at once.
void trials_run_beside_each_other_and_beside_links() {
  const auto a = open("a"), b = open("b"), c = open("c");
  CHECK(reach(*b, "a", "127.0.0.1", a->port()).failure.empty());  // whoever's turn it is
  std::vector<ReachResult> results;
  const Silent silent;
  Nodes nodes;
  add(nodes, "b", "127.0.0.1", b->port());
  add(nodes, "c", "127.0.0.1", c->port());
  add(nodes, "d", "127.0.0.1", silent.port);
  CHECK(a->reach(nodes, Seconds(1.0), &results).ok());
  CHECK(results[0].failure.empty() && results[1].failure.empty());
  CHECK(!results[2].failure.empty());
  CHECK(accepted(*a, 1) == 1 && a->stats().dialled_links == 2);
  add(nodes, "a", "127.0.0.1", a->port());  // itself
  CHECK(!a->reach(nodes, Seconds(1), &results).ok());
}

// Its loop and its waiting caller end while a trial is under way.
void a_trial_ends_with_its_engine() {
  const auto a = open("a");
  const Silent silent;
  std::string failure;
  std::thread waiting([&] { failure = reach(*a, "b", "127.0.0.1", silent.port, 60).failure; });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  a->close();
  waiting.join();
  CHECK(failure == "the engine was closed");
}

// One socket for both families, where the system has both.
void everywhere_is_both_families() {
  std::unique_ptr<Engine> b;
  Options options;
  options.run = "run";
  options.self = {"b", 0};
  options.session_key = {1, 2, 3};
  options.bind_host = "::";
  options.connect_timeout = options.progress_timeout = Seconds(20);
  if (!Engine::create(options, &b).ok()) return;  // no IPv6 here
  const auto a = open("a");
  CHECK(reach(*a, "b", "127.0.0.1", b->port()).failure.empty());
  CHECK(reach(*a, "b", "::1", b->port()).failure.empty());
}

}  // namespace

int main() {
  hosts_are_read();
  the_first_address_that_says_the_right_hello_is_kept();
  another_node_at_an_address_is_passed_over();
  what_failed_is_named_address_by_address();
  trials_run_beside_each_other_and_beside_links();
  a_trial_ends_with_its_engine();
  everywhere_is_both_families();
  return atoll_test::failures() == 0 ? 0 : 1;
}
