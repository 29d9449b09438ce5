// XXH3, 64 bits, with the widest instructions that this processor has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorferry {

[[nodiscard]] std::uint64_t xxh3(const void* bytes, std::size_t count) noexcept;

// The ways to compute it: for any processor, and for one with AVX2.
[[nodiscard]] std::uint64_t xxh3_plain(const void* bytes, std::size_t count) noexcept;
#ifdef __x86_64__
[[nodiscard]] std::uint64_t xxh3_avx2(const void* bytes, std::size_t count) noexcept;
#endif

}  // namespace tensorferry
