// Who is connected: the listening socket, hellos under way, and one link per other node.
//
// Of two nodes the lower name dials and the other accepts. A link stays up between ops. A newer
// authenticated connection of the same node replaces the older one: its peer has restarted, or gave
// the old one up.
//
// Owner: the Engine. Threads: the loop's, except listen() before it runs and the atomics of
// Counters, from any. Failure: nothing here fails as a whole; what happens to one node is told to
// the client.
//
// Strangers get a bounded number of sockets for a bounded time, and no memory that depends on what
// they say.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/clock.h"
#include "engine/hello.h"
#include "engine/link.h"
#include "engine/loop.h"
#include "engine/pool.h"
#include "engine/socket.h"

namespace atoll_core::engine {

struct Counters {
  std::atomic<std::uint64_t> sent_bytes{0};  // at the sockets, hellos included
  std::atomic<std::uint64_t> received_bytes{0};
  std::atomic<std::uint64_t> connections{0};     // links that are up
  std::atomic<std::uint64_t> refused_hellos{0};  // accepted sockets that never proved themselves
  std::atomic<std::uint64_t> dropped_frames{
      0};  // for ops that are unknown, over, or under another plan
  std::atomic<std::uint64_t> open_fds{0};
};

class ConnectionsClient {
 public:
  virtual ~ConnectionsClient() = default;
  // `hello_sent`, `hello_received`: bytes that it took to get there.
  virtual void on_link_up(Link& link, std::size_t hello_sent, std::size_t hello_received) = 0;
  // The link broke, or could not be had.
  virtual void on_link_lost(const NodeName& node, const std::string& reason) = 0;
};

class Connections {
 public:
  static constexpr std::size_t kMaxPendingHellos = 64;

  Connections(Loop& loop, Pool& pool, Counters& counters, Credentials credentials,
              Seconds connect_timeout);
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Before the loop runs. kSystem if the address cannot be had.
  Status listen(const std::string& host, std::uint16_t port, std::uint16_t* bound_port);
  // Likewise: whom to tell, and who handles frames.
  void serve(ConnectionsClient& client, LinkClient& link_client);

  void set_session_key(std::vector<std::uint8_t> key) { credentials_.session_key = std::move(key); }

  // Sees to it that there is a link, if this end is the one that dials. The client hears of success
  // and failure, from flush() or an event; from here only of links that are given up because the
  // node has moved.
  void want(const NodeName& node, const std::string& host, std::uint16_t port);
  // Null while there is none.
  Link* link(const NodeName& node);

  bool on_event(Token token, std::uint32_t events);
  void on_tick(Time now);
  bool has_timed_work() const;
  // Dials who is due, and sends what links have to send.
  void flush();
  bool all_sent() const;
  // After the loop has ended: closes every socket.
  void close();

 private:
  static constexpr Token kListener = 0;

  struct Neighbour {
    NodeName name;
    std::string host;
    std::uint16_t port = 0;
    std::unique_ptr<Link> link;
    Token token = 0;
    bool watching_out = false;

    // Dialling: from want() until there is a link or `give_up_at`.
    bool dialling = false;
    std::vector<Address> addresses;
    std::size_t next_address = 0;
    Time give_up_at;
    Time retry_at;  // Time::max() while a try is under way
    Clock::duration backoff{};
  };

  struct Pending {
    Fd fd;
    std::unique_ptr<Hello> hello;
    bool connecting = false;  // a dial that is not through yet
    bool dialled = false;
    NodeName target;  // if dialled
    Time expires_at;
    std::vector<std::uint8_t> heard;
    std::size_t sent_bytes = 0;
    std::size_t received_bytes = 0;
  };

  // In hellos.cc: until there is a link.
  void accept_all();
  void add_pending(Fd fd, Role role, const NodeName& target);
  void evict_oldest_stranger();
  void advance(Token token, Pending& pending, std::uint32_t events);
  Status hear(Pending& pending);
  Status say(Pending& pending, const std::vector<std::uint8_t>& bytes);
  void adopt(Token token);
  void drop_pending(Token token, const std::string& reason);

  void try_dial(Neighbour& neighbour);
  void resolved(const NodeName& node, const Status& status, std::vector<Address> addresses);
  void dial_failed(Neighbour& neighbour, const std::string& reason, bool final);

  // In connections.cc: from then on.
  void on_link_event(Neighbour& neighbour, std::uint32_t events);
  void close_link(Neighbour& neighbour);
  void lose_link(Neighbour& neighbour, const std::string& reason);
  void flush_link(Neighbour& neighbour, Time now);
  Neighbour& neighbour_of(const NodeName& node);
  void count_fds();

  Loop& loop_;
  Pool& pool_;
  Counters& counters_;
  Credentials credentials_;
  Clock::duration connect_timeout_;
  ConnectionsClient* client_ = nullptr;
  LinkClient* link_client_ = nullptr;

  Fd listener_;
  bool accepting_ = true;  // false after running out of descriptors, until the next tick
  Token next_token_ = 1;
  std::map<Token, Pending> pending_;  // oldest first
  std::map<NodeName, Neighbour> neighbours_;
  std::unordered_map<Token, Neighbour*> links_;
};

}  // namespace atoll_core::engine
