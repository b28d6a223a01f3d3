// A test is a plain function; CHECK counts and prints what does not hold. Main asks failures().
#pragma once

#include <cstdio>

namespace atoll_test {

inline int& failures() {
  static int count = 0;
  return count;
}

inline void check(bool holds, const char* what, const char* file, int line) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, what);
  ++failures();
}

}  // namespace atoll_test

#define CHECK(condition) ::atoll_test::check((condition), #condition, __FILE__, __LINE__)
