#include "engine/frame.h"

#include "engine/wire.h"
#include "kernels/digest.h"

namespace atoll_core::engine {
namespace {

constexpr std::uint32_t kMagic = 0x464c5441;  // "ATLF"
constexpr std::size_t kCheckAt = 56;

bool known(std::uint8_t type) {
  return type >= static_cast<std::uint8_t>(FrameType::kBegin) &&
         type <= static_cast<std::uint8_t>(FrameType::kAckProbe);
}

}  // namespace

FrameBytes pack_frame(const Frame& frame) {
  FrameBytes bytes{};
  std::uint8_t* at = bytes.data();
  put(at, kMagic);
  put(at + 4, static_cast<std::uint8_t>(frame.type));
  put(at + 8, frame.op.term);
  put(at + 16, frame.op.round);
  put(at + 24, frame.op.fragment);
  put(at + 28, frame.op.attempt);
  put(at + 32, frame.plan_digest);
  put(at + 40, frame.chunk);
  put(at + 44, frame.length);
  put(at + 48, frame.checksum);
  put(at + kCheckAt, checksum64(at, kCheckAt));
  return bytes;
}

Status parse_frame(std::span<const std::uint8_t, kFrameBytes> bytes, Frame* out) {
  const std::uint8_t* at = bytes.data();
  if (get<std::uint32_t>(at) != kMagic) return broken("a frame does not begin as one");
  if (get<std::uint64_t>(at + kCheckAt) != checksum64(at, kCheckAt)) {
    return broken("a frame's header does not match its checksum");
  }
  const std::uint8_t type = at[4];
  if (!known(type) || at[5] != 0 || at[6] != 0 || at[7] != 0) {
    return broken("a frame of the unknown type " + std::to_string(type));
  }
  out->type = static_cast<FrameType>(type);
  out->op = {get<std::uint64_t>(at + 8), get<std::uint64_t>(at + 16), get<std::uint32_t>(at + 24),
             get<std::uint32_t>(at + 28)};
  out->plan_digest = get<std::uint64_t>(at + 32);
  out->chunk = get<std::uint32_t>(at + 40);
  out->length = get<std::uint32_t>(at + 44);
  out->checksum = get<std::uint64_t>(at + 48);
  const std::uint32_t longest = out->has_payload() ? kMaxChunkBytes : 0;
  if (out->length > longest) {
    return broken("a frame claims " + std::to_string(out->length) + " bytes of payload; at most " +
                  std::to_string(longest) + " are possible");
  }
  return success();
}

}  // namespace atoll_core::engine
