// All ops under way, and what they make of links, frames, sums and time.
//
// Owner: the Engine. Threads: the loop's. Failure: an op that cannot go on ends with a report that
// says why and names the links; the links themselves stay unless they broke.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/connections.h"
#include "engine/kept.h"
#include "engine/link.h"
#include "engine/loop.h"
#include "engine/pool.h"
#include "engine/probes.h"
#include "engine/reaching.h"
#include "engine/registry.h"
#include "engine/transfer.h"

namespace atoll_core::engine {

class Transfers final : public LinkClient, public ConnectionsClient {
 public:
  Transfers(Loop& loop, Pool& pool, Registry& registry, Connections& connections, Probes& probes,
            Reaching& reaching, Counters& counters, Seconds progress_timeout);

  // `plan` is checked and its op admitted.
  void start(Plan plan, Layout layout, Buffers buffers, Seconds deadline);
  void abort(const OpId& op);
  void abort_all(const std::string& reason);
  bool empty() const { return running_.empty() && ending_.empty(); }
  void on_tick(Time now);

  Status place(Link& link, const Frame& frame, std::uint8_t** where) override;
  Status arrived(Link& link, const Frame& frame, bool kept) override;
  std::optional<Outgoing> next(Link& link) override;
  void moved(const OpId& op, std::size_t sent_bytes, std::size_t received_bytes) override;
  void on_link_up(Link& link, std::size_t hello_sent, std::size_t hello_received) override;
  void on_link_lost(const Link& link, Link* left) override;
  void on_node_lost(const NodeName& node, const std::string& reason) override;
  void on_node_restarted(const NodeName& node) override;
  void on_reached(const NodeName& node, const std::string& where) override;
  void on_unreached(const NodeName& node, const std::string& reason) override;
  bool needs(const NodeName& node) const override;
  std::uint64_t owed(const NodeName& node) const override;

 private:
  using Edges = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

  // The running op that a frame belongs to, under the same plan; else null, and the frame is
  // dropped.
  Transfer* running(const Frame& frame);
  void on_begin(Link& link, const Frame& frame);
  void on_ack(Transfer& transfer, std::uint32_t from, const Frame& frame);
  bool answered_without_op(Link& link, const Frame& frame);
  void answer_late(Link& link, const Frame& begin);
  Status on_payload(Link& link, Transfer& transfer, const Frame& frame, bool kept);
  std::shared_ptr<Kept> kept_for(const OpId& op, Slab* slab);
  // Tells the other end that its data may come, and learns whether ours may; again wherever a link
  // may have lost that. False if that ended the op.
  bool introduce(Transfer& transfer, std::uint32_t node, Link& link);
  bool meet(Transfer& transfer, std::uint32_t node, const Frame& begin, Link& link);
  static void tell(Transfer& transfer, std::uint32_t node, Link& link);
  static Frame begin_frame(const Transfer& transfer, bool wait);
  static Frame ack_frame(const Transfer& transfer, Piece piece);

  void begin_sum(Transfer& transfer, std::uint32_t chunk);
  void end_sum(const OpId& op, std::uint32_t chunk, const Sum& sum);

  // In endings.cc.
  void expire(Transfer& transfer, Time now);
  void keep_alive(Transfer& transfer, Time now);
  std::vector<NodeName> silent_nodes(Time now);
  Edges edges_with(Transfer& transfer, std::uint32_t node) const;
  std::vector<Transfer*> waiting_for(const NodeName& node) const;
  Edges late_edges(Transfer& transfer, Time now);

  static bool all_told(Transfer& transfer);
  void end_if_done(Transfer& transfer);
  void end(Transfer& transfer, bool ok, std::string reason, Edges broken);
  void give_report(const OpId& op);

  Loop& loop_;
  Pool& pool_;
  Registry& registry_;
  Connections& connections_;
  Probes& probes_;
  Reaching& reaching_;
  Counters& counters_;
  Clock::duration progress_timeout_;
  Time last_tick_{};
  Time awake_since_{};  // before, this process itself was paused
  std::map<OpId, std::unique_ptr<Transfer>> running_;
  std::map<OpId, std::unique_ptr<Transfer>> ending_;        // their reports wait for sums under way
  std::map<NodeName, std::map<OpId, Frame>> early_begins_;  // of ops that began elsewhere first
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::shared_ptr<Kept>>
      kept_;                                  // by fragment and round
  std::map<OpId, std::uint64_t> ended_well_;  // plan digests of the newest
};

}  // namespace atoll_core::engine
