// Whatever bytes come over a link, nothing is written where it does not belong, nothing is
// allocated by what they say, and honest frames before the first lie are all read.
//
// Two ways to run it. With clang: -fsanitize=fuzzer -DATOLL_LIBFUZZER, and libFuzzer drives. Else
// main() makes inputs from a seed: honest conversations, cut, spliced and bent. A failing seed is
// printed; `link_fuzz_test SEED` runs it alone.
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "engine/link.h"
#include "engine/wire.h"
#include "kernels/digest.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;
using Bytes = std::vector<std::uint8_t>;

constexpr std::uint32_t kChunks = 4;
constexpr std::uint32_t kChunkBytes = 300;
constexpr std::uint8_t kUntouched = 0xAA;

// A stream that gives one input, in pieces of odd sizes, and takes nothing.
class InputStream final : public Stream {
 public:
  explicit InputStream(std::span<const std::uint8_t> input) : Stream(Fd()), input_(input) {}

  Status handshake(bool* done) override {
    *done = true;
    return success();
  }
  Status read(std::span<const iovec> parts, Moved* moved) override {
    *moved = {};
    std::size_t most = 1 + (calls_++ * 37) % 500;
    for (const iovec& part : parts) {
      const std::size_t count = std::min({part.iov_len, most, input_.size()});
      if (count > 0) std::memcpy(part.iov_base, input_.data(), count);
      input_ = input_.subspan(count);
      most -= count;
      moved->bytes += count;
    }
    moved->more = !input_.empty();
    return success();
  }
  Status write(std::span<const iovec>, Moved* moved) override {
    *moved = {};
    return success();
  }
  Status flush() override { return success(); }
  bool has_unsent() const override { return false; }
  bool has_buffered() const override { return !input_.empty(); }
  void say_goodbye() override {}

 private:
  std::span<const std::uint8_t> input_;
  std::size_t calls_ = 0;
};

// Keeps chunks of the right length, once each, between guards.
class Shelf final : public LinkClient {
 public:
  Shelf() : memory_((kChunks + 2) * kChunkBytes, kUntouched) {}

  Status place(Link&, const Frame& frame, std::uint8_t** where) override {
    CHECK(frame.has_payload() && frame.length <= kMaxChunkBytes);
    if (frame.chunk >= kChunks || frame.length != kChunkBytes) return success();
    if (!kept_[frame.chunk]) *where = at(frame.chunk);
    return success();
  }
  Status arrived(Link&, const Frame& frame, bool kept) override {
    ++arrived_;
    if (!kept) return success();
    CHECK(atoll_core::checksum64(at(frame.chunk), kChunkBytes) == frame.checksum);
    kept_[frame.chunk] = true;
    return success();
  }
  std::optional<Outgoing> next(Link&) override { return std::nullopt; }
  void moved(const OpId&, std::size_t, std::size_t received_bytes) override {
    received_ += received_bytes;
  }

  bool guards_hold() const {
    const auto untouched = [](std::uint8_t byte) { return byte == kUntouched; };
    return std::all_of(memory_.begin(), memory_.begin() + kChunkBytes, untouched) &&
           std::all_of(memory_.end() - kChunkBytes, memory_.end(), untouched);
  }
  std::size_t arrived() const { return arrived_; }
  std::size_t received() const { return received_; }

 private:
  std::uint8_t* at(std::uint32_t chunk) { return memory_.data() + (chunk + 1) * kChunkBytes; }

  Bytes memory_;
  bool kept_[kChunks] = {};
  std::size_t arrived_ = 0;
  std::size_t received_ = 0;
};

// How many frames were read. The budget bounds every pump, as in an engine.
std::size_t read_all(std::span<const std::uint8_t> input) {
  Shelf shelf;
  auto stream = std::make_unique<InputStream>(input);
  const InputStream& rest = *stream;
  Link link(1, std::move(stream), {"peer", 0}, shelf, Clock::now());
  for (std::size_t pumps = 0; rest.has_buffered(); ++pumps) {
    CHECK(pumps <= input.size());
    std::int64_t budget_bytes = 4096;
    if (!link.pump_in(Clock::now(), budget_bytes).ok()) break;
  }
  CHECK(shelf.guards_hold());
  CHECK(shelf.received() <= input.size());
  return shelf.arrived();
}

Bytes payload(std::mt19937_64& random, std::size_t bytes) {
  Bytes out(bytes);
  for (auto& byte : out) byte = static_cast<std::uint8_t>(random());
  return out;
}

// Mostly honest: what a peer that holds the key could say.
void add_frame(std::mt19937_64& random, Bytes& to) {
  Frame frame;
  frame.type = static_cast<FrameType>(1 + random() % 9);
  frame.op = {random() % 3, random() % 3, 0, 0};
  frame.chunk = static_cast<std::uint32_t>(random() % (kChunks + 1));
  Bytes data;
  if (frame.has_payload()) data = payload(random, random() % 4 == 0 ? random() % 700 : kChunkBytes);
  frame.length = static_cast<std::uint32_t>(data.size());
  frame.checksum = atoll_core::checksum64(data.data(), data.size());
  const FrameBytes header = pack_frame(frame);
  to.insert(to.end(), header.begin(), header.end());
  to.insert(to.end(), data.begin(), data.end());
}

void reseal(Bytes& bytes, std::size_t header) {
  if (header + kFrameBytes > bytes.size()) return;
  put(bytes.data() + header + 56, atoll_core::checksum64(bytes.data() + header, 56));
}

void bend(std::mt19937_64& random, Bytes& bytes) {
  if (bytes.empty()) return;
  const std::size_t at = random() % bytes.size();
  switch (random() % 5) {
    case 0:
      bytes[at] ^= static_cast<std::uint8_t>(1u << (random() % 8));
      break;
    case 1:
      bytes.resize(at);
      break;
    case 2:
      bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 3: {
      const Bytes noise = payload(random, random() % 90);
      bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), noise.begin(), noise.end());
      break;
    }
    default:  // a lie under a right checksum
      bytes[std::min<std::size_t>(random() % kFrameBytes, bytes.size() - 1)] ^= 0x55;
      reseal(bytes, 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  read_all({data, size});
  if (atoll_test::failures() > 0) std::abort();
  return 0;
}

#ifndef ATOLL_LIBFUZZER
namespace {

void run_seed(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes;
  const std::size_t frames = 1 + random() % 8;
  for (std::size_t i = 0; i < frames; ++i) add_frame(random, bytes);
  CHECK(read_all(bytes) == frames);
  for (std::uint64_t bends = random() % 4; bends > 0; --bends) bend(random, bytes);
  CHECK(read_all(bytes) <= bytes.size() / kFrameBytes);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const std::uint64_t last = argc > 1 ? first : 20000;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    run_seed(seed);
    if (atoll_test::failures() == 0) continue;
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    return 1;
  }
  return 0;
}
#endif
