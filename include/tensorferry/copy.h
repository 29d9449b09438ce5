// Memory copies, vectorised for the processor they run on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "tensorferry/export.h"

namespace tensorferry {

// What the caller knows about the destination. `cold`: it is not in the cache, and nobody reads it
// soon. The copy then bypasses the cache, which is faster and keeps the source in it.
enum class Destination : std::uint8_t { any, cold };

namespace detail {
// Below this size the fence at the end of a streaming copy costs more than the cache misses that
// the copy avoids (break-even at 16 KiB, 1.4x faster at 32 KiB).
inline constexpr std::size_t stream_bytes_min = std::size_t{32} << 10;
TENSORFERRY_EXPORT void copy_cold(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
}  // namespace detail

// Copies `from` to `to`. They must not overlap. If their sizes differ, copies the smaller number of
// bytes. Any alignment, any length. Thread-safe.
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

// The instruction set that streaming copies use: "avx512", "avx2" or "baseline".
[[nodiscard]] TENSORFERRY_EXPORT const char* copy_instructions() noexcept;

}  // namespace tensorferry
