// The frame parser: what was packed comes back; anything else is refused, and never longer than a
// plan allows.
#include <cstring>
#include <random>

#include "engine/frame.h"
#include "engine/wire.h"
#include "kernels/digest.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

Frame example() {
  Frame frame;
  frame.type = FrameType::kContribution;
  frame.op = {3, 7, 1, 2};
  frame.plan_digest = 0x0123456789abcdef;
  frame.chunk = 99;
  frame.length = 1 << 20;
  frame.checksum = 42;
  return frame;
}

FrameBytes resealed(FrameBytes bytes) {
  put(bytes.data() + 56, atoll_core::checksum64(bytes.data(), 56));
  return bytes;
}

bool parses(const FrameBytes& bytes) {
  Frame frame;
  return parse_frame(bytes, &frame).ok();
}

void packed_frames_come_back() {
  for (auto type = FrameType::kBegin; type <= FrameType::kAckProbe;
       type = static_cast<FrameType>(static_cast<int>(type) + 1)) {
    Frame frame = example();
    frame.type = type;
    if (!frame.has_payload()) frame.length = 0;
    Frame back;
    CHECK(parse_frame(pack_frame(frame), &back).ok());
    CHECK(back == frame);
  }
}

void every_flipped_bit_is_found() {
  const FrameBytes good = pack_frame(example());
  for (std::size_t bit = 0; bit < 8 * kFrameBytes; ++bit) {
    FrameBytes bad = good;
    bad[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
    CHECK(!parses(bad));
  }
}

void lies_with_a_right_checksum_are_refused() {
  FrameBytes bytes = pack_frame(example());
  put(bytes.data() + 44, kMaxChunkBytes + 1);
  CHECK(!parses(resealed(bytes)));
  put(bytes.data() + 44, std::uint32_t{0xffffffff});
  CHECK(!parses(resealed(bytes)));
  bytes = pack_frame(example());
  for (const int type : {0, 10, 255}) {
    bytes[4] = static_cast<std::uint8_t>(type);
    CHECK(!parses(resealed(bytes)));
  }
  Frame ack = example();
  ack.type = FrameType::kAckFinished;
  ack.length = 1;
  CHECK(!parses(pack_frame(ack)));
  bytes = pack_frame(example());
  bytes[5] = 1;
  CHECK(!parses(resealed(bytes)));
}

void noise_is_refused() {
  const unsigned seed = 20240;
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200000; ++i) {
    FrameBytes bytes;
    for (std::size_t at = 0; at < kFrameBytes; at += 8) put(bytes.data() + at, random());
    if (i % 2 == 1) std::memcpy(bytes.data(), "ATLF", 4);
    if (i % 4 == 3) bytes = resealed(bytes);
    Frame frame;
    if (parse_frame(bytes, &frame).ok()) CHECK(frame.length <= kMaxChunkBytes);
  }
}

}  // namespace

int main() {
  packed_frames_come_back();
  every_flipped_bit_is_found();
  lies_with_a_right_checksum_are_refused();
  noise_is_refused();
  return atoll_test::failures() == 0 ? 0 : 1;
}
