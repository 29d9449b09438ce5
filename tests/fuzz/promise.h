// Stops a fuzzer at a broken promise.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace tensorferry::fuzz {

inline void promise(bool kept, const char* what) {
  if (kept) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

}  // namespace tensorferry::fuzz
