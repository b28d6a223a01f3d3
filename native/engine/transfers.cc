#include "engine/transfers.h"

namespace atoll_core::engine {
namespace {

constexpr std::size_t kEarlyBegins = 256;  // per node

Piece piece_of(const Frame& frame) {
  const bool finished = frame.type == FrameType::kFinished || frame.type == FrameType::kAckFinished;
  return {finished ? Phase::kFinished : Phase::kContribution, frame.chunk};
}

}  // namespace

Transfers::Transfers(Loop& loop, Pool& pool, Registry& registry, Connections& connections,
                     Counters& counters, Seconds connect_timeout)
    : loop_(loop),
      pool_(pool),
      registry_(registry),
      connections_(connections),
      counters_(counters),
      connect_timeout_(to_duration(connect_timeout)) {}

// ---- beginning ----

void Transfers::start(Plan plan, Layout layout, Buffers buffers, Seconds deadline) {
  const OpId op = plan.op;
  auto owned = std::make_unique<Transfer>(std::move(plan), std::move(layout), buffers, deadline,
                                          std::exchange(spare_, {}), Clock::now());
  Transfer& transfer = *owned;
  const std::vector<std::uint32_t> partners = transfer.book().partners();
  for (const std::uint32_t node : partners) {
    const Node& to = transfer.plan().nodes[node];
    connections_.want(to.name, to.host, to.port);
  }
  running_[op] = std::move(owned);
  for (const std::uint32_t chunk : transfer.book().complete_at_start()) begin_sum(transfer, chunk);
  for (const std::uint32_t node : partners) {
    Link* link = connections_.link(transfer.name(node));
    if (link != nullptr && !introduce(transfer, node, *link)) return;
  }
  end_if_done(transfer);
}

bool Transfers::introduce(Transfer& transfer, std::uint32_t node, Link& link) {
  Frame begin;
  begin.type = FrameType::kBegin;
  begin.op = transfer.op();
  begin.plan_digest = transfer.layout().digest;
  link.queue(begin);
  auto& early = early_begins_[link.remote()];
  const auto at = early.find(transfer.op());
  if (at == early.end()) return true;
  const std::uint64_t digest = at->second;
  early.erase(at);
  return credit(transfer, node, digest);
}

bool Transfers::credit(Transfer& transfer, std::uint32_t node, std::uint64_t plan_digest) {
  if (plan_digest == transfer.layout().digest) {
    transfer.set_begun(node);
    return true;
  }
  end(transfer, false,
      to_string(transfer.name(node)) + " holds another plan for op " + to_string(transfer.op()) +
          ": members, weights, codec or layout differ from this node's",
      {});
  return false;
}

// ---- frames ----

Transfer* Transfers::running(const Frame& frame) {
  const auto at = running_.find(frame.op);
  if (at == running_.end() || at->second->layout().digest != frame.plan_digest) return nullptr;
  return at->second.get();
}

Status Transfers::place(Link& link, const Frame& frame, std::uint8_t** where) {
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
  if (expected == Expected::kNew) *where = transfer->place(*from, piece);
  return success();
}

Status Transfers::arrived(Link& link, const Frame& frame, bool kept) {
  if (frame.type == FrameType::kPing) return success();
  if (frame.type == FrameType::kBegin) {
    on_begin(link, frame);
    return success();
  }
  Transfer* transfer = running(frame);
  if (transfer == nullptr) {
    ++counters_.dropped_frames;
    return success();
  }
  if (frame.has_payload()) {
    on_payload(link, *transfer, frame, kept);
  } else if (const auto from = transfer->index_of(link.remote())) {
    transfer->book().acked(*from, piece_of(frame));
    end_if_done(*transfer);
  }
  return success();
}

void Transfers::on_begin(Link& link, const Frame& frame) {
  if (const auto at = running_.find(frame.op); at != running_.end()) {
    if (const auto node = at->second->index_of(link.remote()))
      credit(*at->second, *node, frame.plan_digest);
    return;
  }
  if (registry_.over(frame.op)) {
    ++counters_.dropped_frames;
    return;
  }
  auto& early = early_begins_[link.remote()];
  early[frame.op] = frame.plan_digest;
  if (early.size() > kEarlyBegins) early.erase(early.begin());
}

void Transfers::on_payload(Link& link, Transfer& transfer, const Frame& frame, bool kept) {
  const Piece piece = piece_of(frame);
  const std::uint32_t from = *transfer.index_of(link.remote());
  // Dropped though it is still lacking: its op began here only after its header came.
  if (!kept && transfer.book().expects(from, piece) != Expected::kDuplicate) return;
  Frame ack;
  ack.type =
      piece.phase == Phase::kFinished ? FrameType::kAckFinished : FrameType::kAckContribution;
  ack.op = frame.op;
  ack.plan_digest = frame.plan_digest;
  ack.chunk = frame.chunk;
  link.queue(ack);  // duplicates too: the first ack may be what was lost
  if (!kept) return;
  if (transfer.book().received(from, piece)) begin_sum(transfer, piece.chunk);
  end_if_done(transfer);
}

std::optional<Outgoing> Transfers::next(Link& link) {
  for (auto& [op, transfer] : running_) {
    const auto to = transfer->index_of(link.remote());
    if (!to || !transfer->begun(*to)) continue;
    const auto piece = transfer->book().next(*to);
    if (!piece) continue;
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
  return std::nullopt;
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

void Transfers::on_link_up(Link& link, std::size_t hello_sent, std::size_t hello_received) {
  early_begins_.erase(link.remote());
  std::vector<Transfer*> waiting;
  for (auto& [op, transfer] : running_) {
    const auto node = transfer->index_of(link.remote());
    if (node && transfer->book().needs(*node)) waiting.push_back(transfer.get());
  }
  if (waiting.empty()) return;
  waiting.front()->report.sent_bytes += hello_sent;
  waiting.front()->report.received_bytes += hello_received;
  for (Transfer* transfer : waiting) introduce(*transfer, *transfer->index_of(link.remote()), link);
}

void Transfers::on_link_lost(const NodeName& node, const std::string& reason) {
  early_begins_.erase(node);
  std::vector<Transfer*> hit;
  for (auto& [op, transfer] : running_) {
    const auto index = transfer->index_of(node);
    if (index && transfer->book().needs(*index)) hit.push_back(transfer.get());
  }
  for (Transfer* transfer : hit) {
    const std::uint32_t other = *transfer->index_of(node);
    const std::uint32_t self = transfer->layout().self;
    Edges edges;
    if (transfer->book().lacks_from(other)) edges.emplace_back(other, self);
    if (transfer->book().owes(other)) edges.emplace_back(self, other);
    end(*transfer, false, "no link with " + to_string(node) + ": " + reason, std::move(edges));
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
