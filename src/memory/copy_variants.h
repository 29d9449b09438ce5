// The streaming copies behind copy(), one per instruction set, so that a test can run each.
#pragma once

#include <cstddef>
#include <span>

namespace tensorferry::memory {

// Copies with stores that bypass the cache. `to` is aligned to 64 bytes, `bytes` is a multiple of
// stream_step_bytes, and only a store fence orders the stores.
using StreamLoop = void (*)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

inline constexpr std::size_t stream_step_bytes = 256;

struct CopyVariant {
  const char* instructions;  // as copy_instructions() names it
  StreamLoop stream;
};

// The variants that this processor and its operating system can run, best first. The last one is
// "baseline", which every processor can run.
[[nodiscard]] std::span<const CopyVariant> copy_variants() noexcept;

// Streams any length, even a short one, with any alignment. Ends with a store fence.
void stream_copy(const CopyVariant& variant, std::byte* to, const std::byte* from,
                 std::size_t bytes) noexcept;

}  // namespace tensorferry::memory
