// Little-endian numbers in byte arrays of a fixed layout.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace atoll_core::engine {

static_assert(std::endian::native == std::endian::little,
              "the wire is little-endian, and so are we");

template <class T>
void put(std::uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

template <class T>
T get(const std::uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace atoll_core::engine
