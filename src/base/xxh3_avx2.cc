// CMake compiles this file with -mavx2. It must include nothing that has functions which other
// files share: the linker might take those of this one, for processors without AVX2 too.
#ifdef __AVX2__

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/xxh3.h"

namespace tensorferry {

std::uint64_t xxh3_avx2(const void* bytes, std::size_t count) noexcept {
  return XXH3_64bits(bytes, count);
}

}  // namespace tensorferry

#endif
