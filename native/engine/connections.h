// Who is connected: the listening socket, hellos under way, and the links with every other node.
//
// Of two nodes the lower name dials and the other accepts, as many links as are wanted. Where that
// does not work out within a second, the other end dials too: only one of them must be reachable. Of
// several addresses the next is dialled beside those before it, and the first that says the right
// hello is kept. Links stay up between ops.
//
// A node is lost when no link with it is left and none can be had: because it refuses, or because
// the patience is over. So a link that breaks costs a running op only time. After the last one
// both ends dial: a process that is gone is found by its refusal within milliseconds.
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
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/bucket.h"
#include "engine/candidates.h"
#include "engine/clock.h"
#include "engine/hello.h"
#include "engine/link.h"
#include "engine/look_ups.h"
#include "engine/loop.h"
#include "engine/losses.h"
#include "engine/pace.h"
#include "engine/socket.h"
#include "engine/stream.h"
#include "engine/tcp_info.h"
#include "engine/tls.h"

namespace atoll_core::engine {

struct Counters {
  std::atomic<std::uint64_t> sent_bytes{0};  // at the sockets, hellos included
  std::atomic<std::uint64_t> received_bytes{0};
  std::atomic<std::uint64_t> connections{0};     // links that are up
  std::atomic<std::uint64_t> dialled_links{0};   // that ever came up, by who dialled
  std::atomic<std::uint64_t> accepted_links{0};
  std::atomic<std::uint64_t> refused_hellos{0};  // accepted sockets that never proved themselves
  std::atomic<std::uint64_t> broken_links{0};    // links that did not end by close()
  // Frames for ops that are unknown, over, or under another plan.
  std::atomic<std::uint64_t> dropped_frames{0};
  std::atomic<std::uint64_t> open_fds{0};
};

class ConnectionsClient {
 public:
  virtual ~ConnectionsClient() = default;
  // `hello_sent`, `hello_received`: bytes that it took to get there.
  virtual void on_link_up(Link& link, std::size_t hello_sent, std::size_t hello_received) = 0;
  // It broke and is about to go; `left`: the oldest of the node's other links, or null.
  virtual void on_link_lost(const Link& link, Link* left) = 0;
  // No link is left and none can be had, for now.
  virtual void on_node_lost(const NodeName& node, const std::string& reason) = 0;
  // Another engine took the node's place; it knows nothing of what went on with the older one.
  virtual void on_node_restarted(const NodeName& node) = 0;
  // What reach() asked for: its hello came over the address `where`, or over none, and why.
  virtual void on_reached(const NodeName& node, const std::string& where) = 0;
  virtual void on_unreached(const NodeName& node, const std::string& reason) = 0;
  // A running op has business with the node.
  virtual bool needs(const NodeName& node) const = 0;
  // Of pieces: what running ops still owe the node, if anything of it can be sent now; else 0.
  virtual std::uint64_t owed(const NodeName& node) const = 0;
};

struct ConnectionsOptions {
  // In bytes per second over all links together; 0: no limit.
  double max_up = 0;
  double max_down = 0;
  Clock::duration connect_timeout;  // for a connection and its hello
  Clock::duration patience;         // without any link, until a node is lost
  SocketOptions socket;
};

class Connections {
 public:
  static constexpr std::size_t kMaxPendingHellos = 64;
  static constexpr unsigned kMaxConnections = 64;  // with one node

  Connections(Loop& loop, LookUps& look_ups, Counters& counters, Credentials credentials,
              ConnectionsOptions options, std::unique_ptr<Tls> tls);
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Before the loop runs. kSystem if the address cannot be had.
  Status listen(const std::string& host, std::uint16_t port, std::uint16_t* bound_port);
  // Likewise: whom to tell, and who handles frames.
  void serve(ConnectionsClient& client, LinkClient& link_client);

  void set_session_key(std::vector<std::uint8_t> key) { credentials_.session_key = std::move(key); }

  // `host` may be several, see find_candidates().
  // Sees to it that there are so many links while the client needs the node; those above stay. The
  // client hears of what comes of it from flush(), a tick or an event; from here only of links that
  // are given up because the node has moved.
  void want(const NodeName& node, const std::string& host, std::uint16_t port,
            unsigned connections);
  // Dials the node whoever's turn it is and whatever links there are; the link stays. The client
  // hears what came of it, unless stop_reaching() says what there is of it by then.
  void reach(const NodeName& node, const std::string& host, std::uint16_t port);
  std::string stop_reaching(const NodeName& node);
  // For frames without payload: one that is not busy, else the oldest; null while there is none.
  Link* link(const NodeName& node);
  template <class F>
  void for_each_link(const NodeName& node, const F& call);
  // When any byte came from the node, or its newest link; Time::min() if there is no link.
  Time last_received(const NodeName& node) const;
  // The smallest round trip that the system has seen on its links lately; 0 if unknown.
  Seconds round_trip(const NodeName& node) const;
  // The share of segments that the way to it loses, queues apart; 0: none, or unknown.
  double loss(const NodeName& node) const;
  // An op with these has ended: what their links carried meanwhile sets how fast they send.
  void op_ended(const std::vector<NodeName>& nodes);
  // What want() was told last; 0 if nothing was.
  unsigned wanted(const NodeName& node) const;
  // Asks for a sign of life, and gives one, unless bytes have just moved both ways.
  void keep_alive(const NodeName& node, const Frame& ping, Time now);
  // Gives up all links with a node that does not answer any more.
  void drop(const NodeName& node);

  bool on_event(Token token, std::uint32_t events);
  void on_tick(Time now);
  bool has_timed_work() const;
  bool has_more_work() const { return !buffered_.empty(); }
  // Dials who is due, and sends what links have to send.
  void flush();
  bool all_sent() const;
  // After the loop has ended: closes every socket.
  void close();

 private:
  static constexpr Token kListener = 0;

  // A link and what the loop knows of it.
  struct Slot {
    Slot(Token given, std::unique_ptr<Stream> stream, const NodeName& remote, LinkClient& client,
         Time now)
        : token(given), link(given, std::move(stream), remote, client, now) {}
    Token token;
    Link link;
    bool watching_out = false;
    bool paused = false;              // nothing is read until the rate allows it
    TcpFacts facts;                   // as the system said last
  };

  // How a dial was refused: not; by a closed port, which the node itself need not know of; by an
  // engine, which would say the same again.
  enum class Refusal { kNot, kClosedPort, kSaidNo };

  // When to dial a node, and where. A *race* dials its candidates beside each other.
  struct Dialling {
    Time next_try = Time::max();
    unsigned under_way = 0;
    unsigned failures = 0;  // in a row; also links that broke soon
    bool in_vain = false;   // all that was dialled of this place has failed since it was wanted
    std::uint64_t place = 0;            // unlike that of any other place where a node was
    std::vector<std::string> names;     // that have no address yet
    std::set<std::string> resolving;    // of them: being looked up
    std::vector<Candidate> candidates;  // the one that answered last comes first
    bool racing = false;
    bool asked = false;  // by reach(): the race is to end with a word
    Refusal refusal{};               // the weakest of the race, or that of the last dial
    unsigned in_race = 0;
    std::size_t next_candidate = 0;  // of the race
    Time next_start = Time::max();   // of the next candidate
    bool won = false;                // a dial to it has become a link
    bool one_way = false;            // it lives, and dials to it fail
    std::string errors;              // of this race, or of the last dial
    std::string last_error;
  };

  struct Neighbour {
    NodeName name;
    std::string host;
    std::uint16_t port = 0;
    unsigned wanted = 0;                       // 0: nobody has asked for it yet
    std::uint64_t instance = 0;                // of the engine that the links lead to
    std::vector<std::unique_ptr<Slot>> links;  // oldest first
    Dialling dialling;
    Time lost_at = Time::max();  // if there is no link by then
    std::string broke;           // why the last link broke
    std::string origin;          // the address from where the node last called us
    Time pinged_at{};
    Pace pace;
    Losses losses;
    std::uint64_t delivered_bytes{};  // by all links that ever were
    bool far = false;
    bool shares_line = false;  // its share of the line is less than its own pace
    double allowed = 0;        // to all its links, in bytes per second; 0: no limit
  };

  struct Pending {
    std::unique_ptr<Stream> stream;
    std::unique_ptr<Hello> hello;
    bool connecting = false;  // a dial that is not through yet
    bool dialled = false;
    bool shaken = false;  // the stream's handshake is done
    bool raced = false;
    NodeName target;    // if dialled
    std::string where;  // the address that was dialled, or the host that called
    Time expires_at;
    std::vector<std::uint8_t> heard;
  };

  // In hellos.cc: until there is a link.
  void accept_all();
  void add_pending(Fd fd, Role role, const NodeName& target, const std::string& where, bool raced);
  void make_room_for_stranger();
  void advance(Token token, Pending& pending, std::uint32_t events);
  Status go_on(Pending& pending);
  Status hear(Pending& pending);
  Status say(Pending& pending, const std::vector<std::uint8_t>& bytes);
  void adopt(Token token);
  void drop_pending(Token token, const Status& why);
  void count_bytes(const Stream& stream);

  // In dialling.cc: who is dialled when, and when a node is lost.
  bool we_dial_first(const NodeName& node) const { return credentials_.self < node; }
  unsigned missing(const Neighbour& neighbour) const;
  void schedule(Neighbour& neighbour, Clock::duration delay);
  bool our_turn(const Neighbour& neighbour) const;
  void place(Neighbour& neighbour, const std::string& host, std::uint16_t port);
  void dial(Neighbour& neighbour);
  void dial_one(Neighbour& neighbour, std::size_t candidate, bool raced);
  void dial_came(Neighbour& neighbour, const std::string& where, bool raced);
  void dial_failed(Neighbour& neighbour, const std::string& where, bool raced,
                   const std::string& reason, Refusal refusal);
  void race(Neighbour& neighbour);
  void race_on(Neighbour& neighbour);
  void watch_race(Neighbour& neighbour, Time now);
  void stop_race(Neighbour& neighbour);
  void pass_failed(Neighbour& neighbour, Refusal refusal);
  void conclude(Neighbour& neighbour);
  std::string why_unreached(const Neighbour& neighbour) const;
  void link_came(Neighbour& neighbour, bool dialled);
  void link_broke(Neighbour& neighbour, Clock::duration lived);
  bool is_final_word(const Neighbour& neighbour, Refusal refusal) const;
  void give_up(Neighbour& neighbour);
  void watch_patience(Neighbour& neighbour, Time now);

  // In naming.cc: where a node is dialled.
  bool has_candidates(Neighbour& neighbour);
  void look_up_names(Neighbour& neighbour);
  void resolved(const NodeName& node, std::uint64_t place, const std::string& name,
                const Status& status, const std::vector<Candidate>& found);

  // In pacing.cc: how fast links send.
  void watch_paces(Time now);
  Pace::Way tell_pace(Neighbour& neighbour, Time now);
  void share_line();
  static void keep_pace(const Neighbour& neighbour);

  // In connections.cc: links.
  void on_link_event(Token token, std::uint32_t events);
  void flush_node(Neighbour& neighbour, Time now);
  bool flush_link(Neighbour& neighbour, Slot& slot, Time now);
  void read_link(Neighbour& neighbour, Slot& slot, bool failing, Time now);
  void read_buffered(Time now);
  void resume(Time now);
  void watch(const Slot& slot);
  void remove(Neighbour& neighbour, const Slot& slot, const std::string& reason);
  void lose_link(Neighbour& neighbour, const Slot& slot, const std::string& reason);
  void lose_all(Neighbour& neighbour, const std::string& reason);
  void make_room(Neighbour& neighbour);
  Neighbour& neighbour_of(const NodeName& node);
  void count_fds();

  Loop& loop_;
  LookUps& look_ups_;
  Counters& counters_;
  Credentials credentials_;
  ConnectionsOptions options_;
  std::unique_ptr<Tls> tls_;  // null: plain sockets
  ConnectionsClient* client_ = nullptr;
  LinkClient* link_client_ = nullptr;

  Fd listener_;
  bool accepting_ = true;     // false after running out of descriptors, until the next tick
  std::string accept_error_;  // the last such
  Token next_token_ = 1;
  std::uint64_t num_places_ = 0;  // that any nodes ever had
  std::map<Token, Pending> pending_;  // oldest first
  std::map<NodeName, Neighbour> neighbours_;
  std::unordered_map<Token, std::pair<Neighbour*, Slot*>> links_;
  std::set<Token> buffered_;  // links that may have bytes of which epoll does not tell
  Pace line_;  // of all that goes to far nodes
  std::uint64_t line_bytes_ = 0;
  Time paced_at_{};  // when paces were told last
  Bucket up_;
  Bucket down_;
  NodeName last_served_;  // when the rate allowed no more: the others come first now
};

template <class F>
void Connections::for_each_link(const NodeName& node, const F& call) {
  const auto at = neighbours_.find(node);
  if (at == neighbours_.end()) return;
  for (const auto& slot : at->second.links) call(slot->link);
}

}  // namespace atoll_core::engine
