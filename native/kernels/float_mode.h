// While one of these lives, this thread rounds to nearest and keeps denormals, whatever the host
// program has set.
// Owner: the function on whose stack it lies. Threads: the mode is per thread. It cannot fail.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace atoll_core {

class FloatMode {
 public:
  FloatMode() : saved_(read()) { write(kPlain); }
  ~FloatMode() { write(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Bits = std::uint32_t;
  static constexpr Bits kPlain = 0x1f80;  // all exceptions masked, nearest-even, no flush to zero
  static Bits read() { return _mm_getcsr(); }
  static void write(Bits bits) { _mm_setcsr(bits); }
#elif defined(__aarch64__)
  using Bits = std::uint64_t;
  static constexpr Bits kPlain = 0;
  static Bits read() {
    Bits bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void write(Bits bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
#else
  using Bits = int;
  static constexpr Bits kPlain = FE_TONEAREST;
  static Bits read() { return std::fegetround(); }
  static void write(Bits bits) { std::fesetround(bits); }
#endif

  Bits saved_;
};

}  // namespace atoll_core
