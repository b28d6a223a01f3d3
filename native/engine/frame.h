// What flows over a link once both ends have proved themselves: frames of a fixed 64-byte header
// and, for two types, the bytes of one chunk. Little-endian:
//
//    0  u32 magic "ATLF"     4  u8 type     5  3 zero bytes
//    8  u64 term            16  u64 round  24  u32 fragment   28  u32 attempt
//   32  u64 plan digest     40  u32 chunk  44  u32 length of the payload
//   48  u64 checksum64 of the payload      56  u64 checksum64 of bytes 0..55
//
// Owner: nobody, both functions are pure. Threads: any.
// Failure: parse_frame gives kBroken; whoever reads the link closes it, since the next byte has no
// meaning any more.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/ids.h"
#include "engine/status.h"

namespace atoll_core::engine {

enum class FrameType : std::uint8_t {
  kBegin = 1,         // the sender has memory for this op, under this plan: data may come
  kContribution = 2,  // payload: one chunk of the sender's contribution, for the chunk's root
  kFinished = 3,      // payload: one finished chunk, from its root
  kAckContribution = 4,
  kAckFinished = 5,
  kPing = 6,   // are you there?
  kPong = 7,   // the answer, from every engine, whatever it knows of the op
  kProbe = 8,  // payload: bytes to be dropped; they measure the link
  kAckProbe = 9,
};

struct Frame {
  FrameType type = FrameType::kPing;
  OpId op;
  std::uint64_t plan_digest = 0;
  std::uint32_t chunk = 0;
  std::uint32_t length = 0;
  std::uint64_t checksum = 0;

  bool has_payload() const {
    return type == FrameType::kContribution || type == FrameType::kFinished ||
           type == FrameType::kProbe;
  }
  bool operator==(const Frame&) const = default;
};

inline constexpr std::size_t kFrameBytes = 64;
// Plans with larger chunks are refused, so no honest frame is longer.
inline constexpr std::uint32_t kMaxChunkBytes = 1u << 28;

using FrameBytes = std::array<std::uint8_t, kFrameBytes>;

FrameBytes pack_frame(const Frame& frame);
Status parse_frame(std::span<const std::uint8_t, kFrameBytes> bytes, Frame* out);

}  // namespace atoll_core::engine
