#include "engine/transfers.h"

#include <algorithm>

namespace atoll_core::engine {
namespace {

constexpr std::size_t kEarlyBegins = 256;  // per node

// What a begin frame says in its `chunk`.
constexpr std::uint32_t kGoOn = 0;
constexpr std::uint32_t kWaitForAcks = 1;     // acks come, then another begin
constexpr std::uint32_t kNothingMissing = 2;  // the op has ended well here

Piece piece_of(const Frame& frame) {
  const bool finished = frame.type == FrameType::kFinished || frame.type == FrameType::kAckFinished;
  return {finished ? Phase::kFinished : Phase::kContribution, frame.chunk};
}

// What every engine answers, whatever ops it knows.
Frame answer_of(const Frame& frame) {
  Frame answer = frame;
  answer.type = frame.type == FrameType::kPing ? FrameType::kPong : FrameType::kAckProbe;
  answer.length = 0;
  return answer;
}

}  // namespace

Transfers::Transfers(Loop& loop, Pool& pool, Registry& registry, Connections& connections,
                     Probes& probes, Reaching& reaching, Counters& counters, Seconds progress_timeout)
    : loop_(loop),
      pool_(pool),
      registry_(registry),
      connections_(connections),
      probes_(probes),
      reaching_(reaching),
      counters_(counters),
      progress_timeout_(to_duration(progress_timeout)) {}

// ---- beginning ----

void Transfers::start(Plan plan, Layout layout, Buffers buffers, Seconds deadline) {
  const OpId op = plan.op;
  probes_.op_began();
  Slab slab;
  std::shared_ptr<Kept> kept = kept_for(op, &slab);
  auto owned = std::make_unique<Transfer>(std::move(plan), std::move(layout), buffers, deadline,
                                          std::move(kept), std::move(slab), Clock::now());
  Transfer& transfer = *owned;
  const std::vector<std::uint32_t> partners = transfer.book().partners();
  for (const std::uint32_t node : partners) {
    const Node& to = transfer.plan().nodes[node];
    connections_.want(to.name, to.host, to.port, transfer.plan().connections);
  }
  running_[op] = std::move(owned);
  for (const std::uint32_t chunk : transfer.book().complete_at_start()) begin_sum(transfer, chunk);
  for (const std::uint32_t node : partners) {
    Link* link = connections_.link(transfer.name(node));
    if (link != nullptr && !introduce(transfer, node, *link)) return;
  }
  end_if_done(transfer);
}

// What older rounds left is worth its memory only.
std::shared_ptr<Kept> Transfers::kept_for(const OpId& op, Slab* slab) {
  std::erase_if(kept_, [&](auto& entry) {
    const auto& [fragment, round] = entry.first;
    if (fragment != op.fragment || round >= op.round) return false;
    if (entry.second.use_count() > 1) return true;  // an op that still ends
    Slab spare = entry.second->take_slab();
    if (spare.size > slab->size) *slab = std::move(spare);
    return true;
  });
  auto& kept = kept_[{op.fragment, op.round}];
  if (!kept) kept = std::make_shared<Kept>();
  return kept;
}

Frame Transfers::begin_frame(const Transfer& transfer, bool wait) {
  Frame begin;
  begin.type = FrameType::kBegin;
  begin.op = transfer.op();
  begin.plan_digest = transfer.layout().digest;
  begin.chunk = wait ? kWaitForAcks : kGoOn;
  return begin;
}

// Who already holds something from the other end says so before that is sent again: it asks it to
// wait and, once both have begun, acks what it holds and lets it go on.
bool Transfers::introduce(Transfer& transfer, std::uint32_t node, Link& link) {
  if (transfer.with(node).told || transfer.book().held_from(node).empty()) {
    tell(transfer, node, link);
  } else {
    link.queue(begin_frame(transfer, true));
  }
  auto& early = early_begins_[link.remote()];
  const auto at = early.find(transfer.op());
  if (at == early.end()) return true;
  const Frame begin = at->second;
  early.erase(at);
  return meet(transfer, node, begin, link);
}

// Acks and begin in one order on one link: where the begin arrives, the acks have.
void Transfers::tell(Transfer& transfer, std::uint32_t node, Link& link) {
  for (const Piece& piece : transfer.book().held_from(node)) link.queue(ack_frame(transfer, piece));
  link.queue(begin_frame(transfer, false));
  transfer.with(node).told = true;
}

bool Transfers::meet(Transfer& transfer, std::uint32_t node, const Frame& begin, Link& link) {
  if (begin.plan_digest != transfer.layout().digest) {
    end(transfer, false,
        to_string(transfer.name(node)) + " holds another plan for op " + to_string(transfer.op()) +
            ": members, weights, codec or layout differ from this node's",
        {});
    return false;
  }
  Acquaintance& with = transfer.with(node);
  with.credit |= begin.chunk != kWaitForAcks;
  if (begin.chunk == kNothingMissing) transfer.book().acked_all(node);
  if (!with.told) tell(transfer, node, link);
  return true;
}

// ---- frames ----

Transfer* Transfers::running(const Frame& frame) {
  const auto at = running_.find(frame.op);
  if (at == running_.end() || at->second->layout().digest != frame.plan_digest) return nullptr;
  return at->second.get();
}

Status Transfers::place(Link& link, const Frame& frame, std::uint8_t** where) {
  if (frame.type == FrameType::kProbe) return success();
  Transfer* transfer = running(frame);
  if (transfer == nullptr) return success();
  const Piece piece = piece_of(frame);
  const auto from = transfer->index_of(link.remote());
  const Expected expected = from ? transfer->book().expects(*from, piece) : Expected::kNever;
  if (expected == Expected::kNever || frame.length != transfer->layout().chunk_bytes(piece.chunk)) {
    return broken("it sent chunk " + std::to_string(frame.chunk) + " with " +
                  std::to_string(frame.length) + " bytes, which does not fit the plan of op " +
                  to_string(frame.op));
  }
  transfer->rates.receiving(*from, Clock::now());
  if (expected != Expected::kNew) return success();
  // It was sent again while another link still brings it: two must never write one place.
  connections_.for_each_link(link.remote(), [&](Link& other) {
    if (&other != &link) other.drop_payload(frame);
  });
  *where = transfer->place(*from, piece);
  return success();
}

Status Transfers::arrived(Link& link, const Frame& frame, bool kept) {
  if (answered_without_op(link, frame)) return success();
  if (frame.type == FrameType::kBegin) {
    on_begin(link, frame);
    return success();
  }
  Transfer* transfer = running(frame);
  if (transfer == nullptr) {
    ++counters_.dropped_frames;
    return success();
  }
  if (frame.has_payload()) return on_payload(link, *transfer, frame, kept);
  if (const auto from = transfer->index_of(link.remote())) on_ack(*transfer, *from, frame);
  return success();
}

bool Transfers::answered_without_op(Link& link, const Frame& frame) {
  switch (frame.type) {
    case FrameType::kProbe:
      if (running_.empty()) link.queue(answer_of(frame));  // unanswered, no more of them come
      return true;
    case FrameType::kPing:
      link.queue(answer_of(frame));
      return true;
    case FrameType::kAckProbe:
      probes_.answered(link, frame);
      return true;
    default:
      return frame.type == FrameType::kPong;
  }
}

void Transfers::on_ack(Transfer& transfer, std::uint32_t from, const Frame& frame) {
  const Piece piece = piece_of(frame);
  if (transfer.under_way.acked(from, piece))
    transfer.rates.sent(from, transfer.layout().chunk_bytes(piece.chunk), Clock::now());
  transfer.book().acked(from, piece);
  end_if_done(transfer);
}

void Transfers::on_begin(Link& link, const Frame& frame) {
  if (const auto at = running_.find(frame.op); at != running_.end()) {
    const auto node = at->second->index_of(link.remote());
    if (node && meet(*at->second, *node, frame, link)) end_if_done(*at->second);
    return;
  }
  if (registry_.over(frame.op)) {
    answer_late(link, frame);
    return;
  }
  auto& early = early_begins_[link.remote()];
  early[frame.op] = frame;
  if (early.size() > kEarlyBegins) early.erase(early.begin());
}

// The op has ended here. If it ended well, whoever still asks has only lost our last acks.
void Transfers::answer_late(Link& link, const Frame& begin) {
  const auto at = ended_well_.find(begin.op);
  if (at == ended_well_.end() || at->second != begin.plan_digest) {
    ++counters_.dropped_frames;
    return;
  }
  Frame answer = begin;
  answer.chunk = kNothingMissing;
  if (begin.chunk != kNothingMissing) link.queue(answer);
}

Status Transfers::on_payload(Link& link, Transfer& transfer, const Frame& frame, bool kept) {
  const Piece piece = piece_of(frame);
  // The op may have begun here only after place() saw the header, so nobody has looked yet who it
  // is.
  const auto sender = transfer.index_of(link.remote());
  if (!sender) return broken("it is not in the plan of op " + to_string(frame.op));
  const std::uint32_t from = *sender;
  transfer.rates.received(from, frame.length, Clock::now());
  // Dropped though it is still lacking: its place went to another copy, which the sender may have
  // lost before this one, or its op began here only after its header came. The sender takes it for
  // arrived; without this link it sends it again.
  if (!kept && transfer.book().expects(from, piece) != Expected::kDuplicate)
    return broken("chunk " + std::to_string(piece.chunk) + " of op " + to_string(frame.op) +
                  " found no place");
  // Duplicates too, and on the link that brought it: if the ack is lost with that, the piece comes
  // again.
  link.queue(ack_frame(transfer, piece));
  if (!kept) return success();
  if (transfer.received(from, piece, frame.checksum)) begin_sum(transfer, piece.chunk);
  end_if_done(transfer);
  return success();
}

Frame Transfers::ack_frame(const Transfer& transfer, Piece piece) {
  Frame ack;
  ack.type =
      piece.phase == Phase::kFinished ? FrameType::kAckFinished : FrameType::kAckContribution;
  ack.op = transfer.op();
  ack.plan_digest = transfer.layout().digest;
  ack.chunk = piece.chunk;
  return ack;
}

std::optional<Outgoing> Transfers::next(Link& link) {
  for (auto& [op, transfer] : running_) {
    const auto to = transfer->index_of(link.remote());
    if (!to || !transfer->with(*to).credit) continue;
    const auto piece = transfer->book().next(*to);
    if (!piece) continue;
    transfer->under_way.sent(*to, *piece, link.id());
    transfer->rates.sending(*to, Clock::now());
    Outgoing out;
    out.frame.type =
        piece->phase == Phase::kFinished ? FrameType::kFinished : FrameType::kContribution;
    out.frame.op = op;
    out.frame.plan_digest = transfer->layout().digest;
    out.frame.chunk = piece->chunk;
    out.frame.length = static_cast<std::uint32_t>(transfer->layout().chunk_bytes(piece->chunk));
    out.frame.checksum = transfer->checksum_of(*piece);
    out.payload = transfer->bytes_of(*piece);
    return out;
  }
  return running_.empty() ? probes_.next(link) : std::nullopt;
}

void Transfers::moved(const OpId& op, std::size_t sent_bytes, std::size_t received_bytes) {
  counters_.sent_bytes += sent_bytes;
  counters_.received_bytes += received_bytes;
  const auto at = running_.find(op);
  if (at == running_.end()) return;
  at->second->report.sent_bytes += sent_bytes;
  at->second->report.received_bytes += received_bytes;
}

// ---- links ----

std::vector<Transfer*> Transfers::waiting_for(const NodeName& node) const {
  std::vector<Transfer*> waiting;
  for (const auto& [op, transfer] : running_) {
    const auto index = transfer->index_of(node);
    if (index && transfer->book().needs(*index)) waiting.push_back(transfer.get());
  }
  return waiting;
}

bool Transfers::needs(const NodeName& node) const {
  return probes_.needs(node) || reaching_.needs(node) || !waiting_for(node).empty();
}

std::uint64_t Transfers::owed(const NodeName& node) const {
  std::uint64_t pieces = 0;
  for (const auto& [op, transfer] : running_) {
    const auto index = transfer->index_of(node);
    if (index && transfer->book().waits_for_ack_of(*index)) pieces += transfer->book().owed(*index);
  }
  return pieces;
}

void Transfers::on_link_up(Link& link, std::size_t hello_sent, std::size_t hello_received) {
  const std::vector<Transfer*> waiting = waiting_for(link.remote());
  if (waiting.empty()) return;
  waiting.front()->report.sent_bytes += hello_sent;
  waiting.front()->report.received_bytes += hello_received;
  for (Transfer* transfer : waiting) introduce(*transfer, *transfer->index_of(link.remote()), link);
}

void Transfers::on_link_lost(const Link& link, Link* left) {
  const Time now = Clock::now();
  for (auto& [op, transfer] : running_) {
    const auto node = transfer->index_of(link.remote());
    if (!node) continue;
    for (const Piece& piece : transfer->under_way.link_lost(*node, link.id())) {
      transfer->rates.sent(*node, 0, now);
      transfer->book().send_again(*node, piece);
    }
    if (link.reading() != nullptr && link.reading()->op == op)
      transfer->rates.received(*node, 0, now);
  }
  if (left == nullptr) return;
  // What was said on it about ops may be lost.
  for (Transfer* transfer : waiting_for(link.remote()))
    introduce(*transfer, *transfer->index_of(link.remote()), *left);
}

void Transfers::on_reached(const NodeName& node, const std::string& where) {
  reaching_.reached(node, where);
}

void Transfers::on_unreached(const NodeName& node, const std::string& reason) {
  reaching_.unreached(node, reason);
}

void Transfers::on_node_lost(const NodeName& node, const std::string& reason) {
  probes_.lost(node, reason);
  for (Transfer* transfer : waiting_for(node)) {
    end(*transfer, false, "no link with " + to_string(node) + ": " + reason,
        edges_with(*transfer, *transfer->index_of(node)));
  }
}

// What it had of an op is gone. An op that it had not begun may yet begin there.
void Transfers::on_node_restarted(const NodeName& node) {
  early_begins_.erase(node);
  for (Transfer* transfer : waiting_for(node)) {
    const std::uint32_t index = *transfer->index_of(node);
    if (!std::exchange(transfer->with(index), {}).credit) continue;
    end(*transfer, false, to_string(node) + " was started anew in the middle of the op",
        edges_with(*transfer, index));
  }
}

// ---- sums ----

void Transfers::begin_sum(Transfer& transfer, std::uint32_t chunk) {
  ++transfer.sums_under_way;
  pool_.submit([this, &transfer, op = transfer.op(), chunk] {
    const Sum sum = transfer.cancelled ? Sum{} : transfer.sum(chunk);
    loop_.post([this, op, chunk, sum] { end_sum(op, chunk, sum); });
  });
}

void Transfers::end_sum(const OpId& op, std::uint32_t chunk, const Sum& sum) {
  if (const auto at = ending_.find(op); at != ending_.end()) {
    if (--at->second->sums_under_way == 0) give_report(op);
    return;
  }
  Transfer& transfer = *running_.at(op);
  --transfer.sums_under_way;
  transfer.report.encode_s += sum.seconds;
  if (!sum.finite) {
    end(transfer, false,
        "the mean of chunk " + std::to_string(chunk) + " (elements " +
            std::to_string(transfer.plan().chunk_starts[chunk]) + " to " +
            std::to_string(transfer.plan().chunk_starts[chunk + 1]) +
            ") is not finite: a contribution is damaged",
        {});
    return;
  }
  transfer.summed(chunk, sum);
  end_if_done(transfer);
}

}  // namespace atoll_core::engine
