// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the proofs in the engine's hello.
// Owner: nobody, all functions are pure. Threads: any. They cannot fail.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace atoll_core {

using Sha256 = std::array<std::uint8_t, 32>;

Sha256 sha256(std::span<const std::uint8_t> data);
Sha256 hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> data);

// Takes the same time wherever the first difference is. Different lengths are unequal at once.
bool equal_constant_time(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b);

}  // namespace atoll_core
