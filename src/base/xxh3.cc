#include "base/xxh3.h"

#define XXH_INLINE_ALL  // so that programs that link the library need no other one
#include <xxhash.h>

namespace tensorferry {

std::uint64_t xxh3_plain(const void* bytes, std::size_t count) noexcept {
  return XXH3_64bits(bytes, count);
}

std::uint64_t xxh3(const void* bytes, std::size_t count) noexcept {
#ifdef __x86_64__
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return xxh3_avx2(bytes, count);
#endif
  return xxh3_plain(bytes, count);
}

}  // namespace tensorferry
