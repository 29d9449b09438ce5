// Memory copies, vectorised for the processor at hand.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "tensorferry/export.h"

namespace tensorferry {

// What is known about the destination. `cold` means that it is not in cache and will not be read
// at once: the copy then streams past the cache, which is faster and keeps the source hot.
enum class Destination : std::uint8_t { any, cold };

namespace detail {
// Below this the fence at the end of a streaming copy costs more than the cache misses that it
// saves (even at 16 KiB, 1.4x at 32 KiB).
inline constexpr std::size_t stream_bytes_min = std::size_t{32} << 10;
TENSORFERRY_EXPORT void copy_cold(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
}  // namespace detail

// Copies all of `from` to `to`, which must not overlap and must be of the same size (the smaller
// size counts if they are not). Any alignment, any length.
inline void copy(std::span<std::byte> to, std::span<const std::byte> from,
                 Destination destination = Destination::any) noexcept {
  const std::size_t bytes = std::min(to.size(), from.size());
  if (bytes == 0) return;
  if (destination == Destination::cold && bytes >= detail::stream_bytes_min) {
    detail::copy_cold(to.data(), from.data(), bytes);
  } else {
    std::memcpy(to.data(), from.data(), bytes);
  }
}

// The instruction set in use: "avx512", "avx2" or "baseline".
[[nodiscard]] TENSORFERRY_EXPORT const char* copy_instructions() noexcept;

}  // namespace tensorferry
