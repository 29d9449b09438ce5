// Memory copies, vectorised for the processor at hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensorferry/export.h"

namespace tensorferry {

// What is known about the destination. `cold` means that it is not in cache and will not be read
// at once: the copy then streams past the cache, which is faster and keeps the source hot.
enum class Destination : std::uint8_t { any, cold };

// Copies all of `from` to `to`, which must not overlap and must be of the same size (the smaller
// size counts if they are not). Any alignment, any length.
TENSORFERRY_EXPORT void copy(std::span<std::byte> to, std::span<const std::byte> from,
                             Destination destination = Destination::any) noexcept;

// The instruction set in use: "avx512", "avx2" or "baseline".
[[nodiscard]] TENSORFERRY_EXPORT const char* copy_instructions() noexcept;

}  // namespace tensorferry
