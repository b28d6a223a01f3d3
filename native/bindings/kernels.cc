// atoll._native, first half: codecs, outer step, digests. See src/atoll/_native.pyi for what each
// does. Every function checks its arguments with the interpreter lock held, then works without it.
// Arrays are never converted: nanobind would hand a strided or float64 array to an in-place kernel
// as a copy, and the caller would see nothing. Outputs must be writable; inputs may be read-only.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "kernels/codec.h"
#include "kernels/digest.h"
#include "kernels/loops.h"
#include "kernels/outer.h"
#include "kernels/sha256.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace atoll_core {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = Array<float>;
using ConstFloats = Array<const float>;
using Bytes = Array<std::uint8_t>;
using ConstBytes = Array<const std::uint8_t>;
using ConstInts = Array<const std::int64_t>;

std::invalid_argument bad_value(const std::string& text) { return std::invalid_argument(text); }

// Throws unless `got`, the length of `what`, is `wanted`, which `whose` demands.
void check_size(const char* what, std::size_t got, const char* whose, std::size_t wanted) {
  if (got == wanted) return;
  throw bad_value("the length of " + std::string(what) + " is " + std::to_string(got) + "; " +
                  whose + " needs " + std::to_string(wanted));
}

// A codec and where its blocks begin: the arguments that all codec functions share, checked.
struct Grid {
  Grid(std::string_view name, const ConstInts& starts) : boundaries(starts.data(), starts.size()) {
    const auto found = find_codec(name);
    if (!found) {
      throw bad_value("unknown codec '" + std::string(name) + "'; known: " + codec_names());
    }
    if (!valid_boundaries(boundaries)) {
      throw bad_value("boundaries must begin with 0 and never decrease");
    }
    codec = *found;
  }

  std::int64_t numel() const { return boundaries.back(); }
  void check_values(const char* what, std::size_t size) const {
    check_size(what, size, "the grid", static_cast<std::size_t>(numel()));
  }
  void check_wire(const char* what, std::size_t size) const {
    const auto wanted = static_cast<std::size_t>(range_bytes(codec, boundaries, 0, numel()));
    check_size(what, size, "the grid", wanted);
  }

  Codec codec = Codec::kFp32;
  Boundaries boundaries;
};

bool encode(std::string_view codec, ConstInts boundaries, ConstFloats values, Bytes out) {
  const Grid grid(codec, boundaries);
  grid.check_values("values", values.size());
  grid.check_wire("out", out.size());
  const nb::gil_scoped_release unlocked;
  return encode_range(grid.codec, grid.boundaries, 0, grid.numel(), values.data(), out.data());
}

void decode(std::string_view codec, ConstInts boundaries, ConstBytes data, Floats out) {
  const Grid grid(codec, boundaries);
  grid.check_wire("data", data.size());
  grid.check_values("out", out.size());
  const nb::gil_scoped_release unlocked;
  decode_range(grid.codec, grid.boundaries, 0, grid.numel(), data.data(), out.data());
}

bool encode_fed(std::string_view codec, ConstInts boundaries, ConstFloats delta,
                ConstFloats residual, double beta, Bytes out) {
  const Grid grid(codec, boundaries);
  grid.check_values("delta", delta.size());
  grid.check_values("residual", residual.size());
  grid.check_wire("out", out.size());
  const nb::gil_scoped_release unlocked;
  return encode_range_with_feedback(grid.codec, grid.boundaries, 0, grid.numel(), delta.data(),
                                    residual.data(), static_cast<float>(beta), out.data());
}

void move_residual(std::string_view codec, ConstInts boundaries, ConstFloats delta, double beta,
                   ConstBytes data, Floats residual) {
  const Grid grid(codec, boundaries);
  grid.check_values("delta", delta.size());
  grid.check_values("residual", residual.size());
  grid.check_wire("data", data.size());
  const nb::gil_scoped_release unlocked;
  update_residual(grid.codec, grid.boundaries, 0, grid.numel(), delta.data(),
                  static_cast<float>(beta), data.data(), residual.data());
}

void check_weights(const std::vector<std::uint64_t>& weights) {
  std::uint64_t total = 0;
  for (const std::uint64_t weight : weights) {
    if (__builtin_add_overflow(total, weight, &total)) {
      throw bad_value(
          "the sum of the weights does not fit 64 bits; divide them by a common factor");
    }
  }
  if (total == 0) throw bad_value("the weights are all zero; at least one must be positive");
}

bool weighted_mean(std::string_view codec, ConstInts boundaries,
                   const std::vector<ConstBytes>& contributions,
                   const std::vector<std::uint64_t>& weights, Bytes out) {
  const Grid grid(codec, boundaries);
  check_size("weights", weights.size(), "contributions", contributions.size());
  check_weights(weights);
  std::vector<const std::uint8_t*> data;
  for (const ConstBytes& contribution : contributions) {
    grid.check_wire("a contribution", contribution.size());
    data.push_back(contribution.data());
  }
  grid.check_wire("out", out.size());
  const nb::gil_scoped_release unlocked;
  return reduce_range(grid.codec, grid.boundaries, 0, grid.numel(), data, weights, out.data());
}

void step(Floats anchor, Floats velocity, ConstFloats mean, double lr, double momentum,
          bool nesterov) {
  check_size("velocity", velocity.size(), "anchor", anchor.size());
  check_size("mean", mean.size(), "anchor", anchor.size());
  const nb::gil_scoped_release unlocked;
  outer_step({anchor.data(), anchor.size()}, {velocity.data(), velocity.size()},
             {mean.data(), mean.size()},
             {static_cast<float>(lr), static_cast<float>(momentum), nesterov});
}

double norm(ConstFloats values) {
  const nb::gil_scoped_release unlocked;
  return squared_norm({values.data(), values.size()});
}

using Table = nb::ndarray<nb::numpy, std::uint64_t, nb::shape<-1, 2>, nb::c_contig>;

Table pieces(ConstFloats values, std::int64_t start, std::int64_t piece) {
  if (start < 0) throw bad_value("start is " + std::to_string(start) + "; it must be at least 0");
  if (piece < 1) throw bad_value("piece is " + std::to_string(piece) + "; it must be at least 1");
  const std::span<const float> elements(values.data(), values.size());
  const std::size_t rows = num_pieces(start, elements.size(), piece);
  auto* table = new Digest[rows];
  nb::capsule owner(table, [](void* p) noexcept { delete[] static_cast<Digest*>(p); });
  {
    const nb::gil_scoped_release unlocked;
    digest_pieces(elements, start, piece, {table, rows});
  }
  return Table(&table->a, {rows, 2}, owner);
}

template <std::size_t N>
nb::bytes to_bytes(const std::array<std::uint8_t, N>& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

std::span<const std::uint8_t> view(const nb::bytes& bytes) {
  return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

nb::bytes fingerprint(ConstBytes data) {
  std::array<std::uint8_t, 16> bytes;
  {
    const nb::gil_scoped_release unlocked;
    bytes = digest_bytes(data.data(), data.size());
  }
  return to_bytes(bytes);
}

std::vector<std::string> target_names() {
  std::vector<std::string> names;
  for (const Loops* target : available_targets()) names.emplace_back(target->target);
  return names;
}

void set_target(std::string_view name) {
  if (use_target(name)) return;
  throw bad_value("this machine cannot run target '" + std::string(name) + "'");
}

}  // namespace

void bind_kernels(nb::module_& m) {
  const auto as_it_is = [](const char* name) { return nb::arg(name).noconvert(); };

  m.def("encode", encode, "codec"_a, as_it_is("boundaries"), as_it_is("values"), as_it_is("out"));
  m.def("decode", decode, "codec"_a, as_it_is("boundaries"), as_it_is("data"), as_it_is("out"));
  m.def("encode_with_feedback", encode_fed, "codec"_a, as_it_is("boundaries"), as_it_is("delta"),
        as_it_is("residual"), "beta"_a, as_it_is("out"));
  m.def("update_residual", move_residual, "codec"_a, as_it_is("boundaries"), as_it_is("delta"),
        "beta"_a, as_it_is("data"), as_it_is("residual"));
  m.def("weighted_mean", weighted_mean, "codec"_a, as_it_is("boundaries"),
        as_it_is("contributions"), "weights"_a, as_it_is("out"));
  m.def("outer_step", step, as_it_is("anchor"), as_it_is("velocity"), as_it_is("mean"), "lr"_a,
        "momentum"_a, "nesterov"_a);
  m.def("squared_norm", norm, as_it_is("values"));
  m.def("digest_pieces", pieces, as_it_is("values"), "start"_a, "piece"_a);
  m.def("digest_bytes", fingerprint, as_it_is("data"));
  m.def("sha256", [](nb::bytes data) { return to_bytes(sha256(view(data))); }, "data"_a);
  m.def(
      "hmac_sha256",
      [](nb::bytes key, nb::bytes data) { return to_bytes(hmac_sha256(view(key), view(data))); },
      "key"_a, "data"_a);
  m.def("kernel_target", [] { return loops().target; });
  m.def("kernel_targets", target_names);
  m.def("set_kernel_target", set_target, "name"_a);
}

}  // namespace atoll_core
