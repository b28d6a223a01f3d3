// The Python face of the engine. It holds references to the caller's arrays for as long as the
// engine may touch them.
#include "engine/engine.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace atoll_core {
namespace {

using engine::Engine;
using engine::NodeName;
using engine::OpId;
using engine::Plan;
using engine::Report;
using engine::Seconds;
using engine::Status;

using InputBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutputBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using OpTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t, std::uint32_t>;
using NodeTuple = std::tuple<std::string, std::uint32_t, std::string, std::uint16_t, std::uint64_t>;
using LaneTuple = std::tuple<std::uint32_t, std::vector<std::uint32_t>, std::vector<std::uint64_t>,
                             std::vector<std::int64_t>, std::vector<std::int64_t>>;
// Whom to probe: peer, rank, host, port.
using TargetTuple = std::tuple<std::string, std::uint32_t, std::string, std::uint16_t>;
using RateTuple = std::tuple<std::int64_t, std::int64_t, double, double, double>;
using ReportTuple =
    std::tuple<bool, std::string, std::vector<std::pair<std::uint32_t, std::uint32_t>>, nb::dict,
               std::vector<RateTuple>>;
using ProbeTuple = std::tuple<double, double, std::string>;

OpId op_of(const OpTuple& op) {
  return {std::get<0>(op), std::get<1>(op), std::get<2>(op), std::get<3>(op)};
}

std::vector<std::uint8_t> bytes_of(const nb::bytes& bytes) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(bytes.c_str());
  return {begin, begin + bytes.size()};
}

std::vector<std::int64_t> vector_of(const Int64s& array) {
  return {array.data(), array.data() + array.size()};
}

// Each kind of failure becomes one Python class, here and nowhere else.
void raise_if_failed(const Status& status) {
  if (status.ok()) return;
  if (status.kind == engine::Kind::kSystem) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(status.error_number, status.text).ptr());
    throw nb::python_error();
  }
  throw nb::value_error(status.text.c_str());
}

// Python says -1 for nobody; what is no index at all is refused with the plan.
std::vector<std::uint32_t> parents_of(const std::vector<std::int64_t>& parents) {
  std::vector<std::uint32_t> out;
  for (const std::int64_t parent : parents) {
    const bool index = parent >= 0 && parent < engine::kNobody;
    out.push_back(parent == -1 ? engine::kNobody
                  : index      ? static_cast<std::uint32_t>(parent)
                               : engine::kNobody - 1);
  }
  return out;
}

Plan plan_of(const OpTuple& op, const std::vector<NodeTuple>& nodes,
             const std::vector<LaneTuple>& lanes, const std::string& codec,
             const Int64s& boundaries, const Int64s& chunk_starts, const Int64s& chunk_lanes,
             std::uint64_t order, const std::optional<InputBytes>& held) {
  const auto found = find_codec(codec);
  if (!found) {
    throw nb::value_error(("unknown codec '" + codec + "'; known: " + codec_names()).c_str());
  }
  Plan plan;
  plan.op = op_of(op);
  plan.codec = *found;
  for (const auto& [peer, rank, host, port, stamp] : nodes)
    plan.nodes.push_back({{peer, rank}, host, port, stamp});
  for (const auto& [root, sources, weights, up, down] : lanes)
    plan.lanes.push_back({root, sources, weights, parents_of(up), parents_of(down)});
  plan.boundaries = vector_of(boundaries);
  plan.chunk_starts = vector_of(chunk_starts);
  plan.chunk_lanes = vector_of(chunk_lanes);
  plan.order = order;
  if (held) plan.held.assign(held->data(), held->data() + held->size());
  return plan;
}

// The engine's threads never need the interpreter, but other Python threads do while we wait.
template <class F>
auto without_gil(const F& call) {
  nb::gil_scoped_release unlocked;
  return call();
}

class PyEngine {
 public:
  PyEngine(const std::string& run, const std::string& peer, std::uint32_t rank,
           const nb::bytes& session_key, const std::string& bind_host, std::uint16_t port,
           double connect_timeout_s, unsigned num_workers, double progress_timeout_s,
           const std::string& congestion, int buffer_bytes, double max_up_bytes_per_s,
           double max_down_bytes_per_s, const std::string& tls_certificates,
           const std::string& tls_key, const std::string& tls_authorities, bool tls_named) {
    engine::Options options;
    options.run = run;
    options.self = {peer, rank};
    options.session_key = bytes_of(session_key);
    options.bind_host = bind_host;
    options.port = port;
    options.connect_timeout = Seconds(connect_timeout_s);
    options.progress_timeout = Seconds(progress_timeout_s);
    options.num_workers = num_workers;
    options.congestion = congestion;
    options.buffer_bytes = buffer_bytes;
    options.max_up = max_up_bytes_per_s;
    options.max_down = max_down_bytes_per_s;
    options.tls = {.certificates = tls_certificates,
                   .key = tls_key,
                   .authorities = tls_authorities,
                   .named = tls_named};
    raise_if_failed(without_gil([&] { return Engine::create(std::move(options), &engine_); }));
  }
  // Joins the threads before the arrays are let go.
  ~PyEngine() { close(); }

  std::uint16_t port() const { return engine_->port(); }
  void set_session_key(const nb::bytes& key) { engine_->set_session_key(bytes_of(key)); }

  void start(const OpTuple& op, const std::vector<NodeTuple>& nodes,
             const std::vector<LaneTuple>& lanes, const std::string& codec,
             const Int64s& boundaries, const Int64s& chunk_starts, const Int64s& chunk_lanes,
             const std::optional<InputBytes>& contribution, const OutputBytes& result,
             double deadline_s, unsigned connections, std::uint64_t order,
             const std::optional<InputBytes>& held) {
    Plan plan =
        plan_of(op, nodes, lanes, codec, boundaries, chunk_starts, chunk_lanes, order, held);
    plan.connections = connections;
    const std::uint8_t* from = contribution ? contribution->data() : nullptr;
    const std::size_t from_bytes = contribution ? contribution->size() : 0;
    // Does not block; keeping the interpreter lock means that nobody waits for the op before its
    // arrays are held.
    raise_if_failed(engine_->start(std::move(plan), from, from_bytes, result.data(), result.size(),
                                   Seconds(deadline_s)));
    held_.insert_or_assign(op_of(op), Held{contribution, result});
  }

  std::optional<ReportTuple> wait(const OpTuple& op, double timeout_s) {
    bool known = false;
    std::optional<Report> report =
        without_gil([&] { return engine_->wait(op_of(op), Seconds(timeout_s), &known); });
    if (!known)
      throw nb::value_error(
          ("op " + engine::to_string(op_of(op)) + " is not running here").c_str());
    if (!report) return std::nullopt;
    held_.erase(op_of(op));
    nb::dict stats;
    stats["sent_bytes"] = report->sent_bytes;
    stats["received_bytes"] = report->received_bytes;
    stats["wire_s"] = report->wire_s;
    stats["encode_s"] = report->encode_s;
    std::vector<RateTuple> links;
    for (const engine::LinkRate& rate : report->links)
      links.emplace_back(rate.from, rate.to, rate.bytes_per_s, rate.rtt_s, rate.loss);
    return ReportTuple(report->ok, std::move(report->reason), std::move(report->broken),
                       std::move(stats), std::move(links));
  }

  void abort(const OpTuple& op) { engine_->abort(op_of(op)); }

  std::vector<ProbeTuple> probe(const std::vector<TargetTuple>& targets, std::uint64_t bytes,
                                double deadline_s, unsigned connections) {
    std::vector<engine::Node> nodes;
    for (const auto& [peer, rank, host, port] : targets)
      nodes.push_back({{peer, rank}, host, port, 0});
    std::vector<engine::ProbeResult> results;
    raise_if_failed(without_gil(
        [&] { return engine_->probe(nodes, connections, bytes, Seconds(deadline_s), &results); }));
    std::vector<ProbeTuple> out;
    for (const engine::ProbeResult& one : results)
      out.emplace_back(one.bytes_per_s, one.rtt_s, one.failure);
    return out;
  }

  std::vector<std::pair<std::string, std::string>> reach(const std::vector<TargetTuple>& targets,
                                                         double deadline_s) {
    std::vector<engine::Node> nodes;
    for (const auto& [peer, rank, host, port] : targets)
      nodes.push_back({{peer, rank}, host, port, 0});
    std::vector<engine::ReachResult> results;
    raise_if_failed(
        without_gil([&] { return engine_->reach(nodes, Seconds(deadline_s), &results); }));
    std::vector<std::pair<std::string, std::string>> out;
    for (const engine::ReachResult& one : results) out.emplace_back(one.where, one.failure);
    return out;
  }

  nb::dict stats() const {
    const engine::Stats stats = engine_->stats();
    nb::dict out;
    out["sent_bytes"] = stats.sent_bytes;
    out["received_bytes"] = stats.received_bytes;
    out["connections"] = stats.connections;
    out["dialled_links"] = stats.dialled_links;
    out["accepted_links"] = stats.accepted_links;
    out["refused_hellos"] = stats.refused_hellos;
    out["broken_links"] = stats.broken_links;
    out["dropped_frames"] = stats.dropped_frames;
    out["open_fds"] = stats.open_fds;
    return out;
  }

  void close() {
    without_gil([&] {
      if (engine_) engine_->close();
      return 0;
    });
    held_.clear();
  }

 private:
  struct Held {
    std::optional<InputBytes> contribution;
    OutputBytes result;
  };

  std::unique_ptr<Engine> engine_;
  std::map<OpId, Held> held_;  // guarded by the interpreter lock
};

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<PyEngine>(m, "Engine")
      .def(nb::init<const std::string&, const std::string&, std::uint32_t, const nb::bytes&,
                    const std::string&, std::uint16_t, double, unsigned, double, const std::string&,
                    int, double, double, const std::string&, const std::string&,
                    const std::string&, bool>(),
           nb::kw_only(), "run"_a, "peer"_a, "rank"_a, "session_key"_a, "bind_host"_a, "port"_a,
           "connect_timeout_s"_a, "num_workers"_a, "progress_timeout_s"_a = 5.0,
           "congestion"_a = "", "buffer_bytes"_a = 0, "max_up_bytes_per_s"_a = 0.0,
           "max_down_bytes_per_s"_a = 0.0, "tls_certificates"_a = "", "tls_key"_a = "",
           "tls_authorities"_a = "", "tls_named"_a = false)
      .def_prop_ro("port", &PyEngine::port)
      .def("set_session_key", &PyEngine::set_session_key, "session_key"_a)
      .def("start", &PyEngine::start, nb::kw_only(), "op"_a, "nodes"_a, "lanes"_a, "codec"_a,
           "boundaries"_a.noconvert(), "chunk_starts"_a.noconvert(), "chunk_lanes"_a.noconvert(),
           "contribution"_a.noconvert().none(), "result"_a.noconvert(), "deadline_s"_a,
           "connections"_a = 1, "order"_a = 0, "held"_a.noconvert() = nb::none())
      .def("wait", &PyEngine::wait, "op"_a, "timeout_s"_a)
      .def("abort", &PyEngine::abort, "op"_a)
      .def("probe", &PyEngine::probe, "nodes"_a, "bytes"_a, "deadline_s"_a, "connections"_a = 1)
      .def("reach", &PyEngine::reach, "targets"_a, "deadline_s"_a)
      .def("stats", &PyEngine::stats)
      .def("close", &PyEngine::close);
  m.def("tls_is_built", &engine::tls_is_built);
}

}  // namespace atoll_core
