// Sizes and alignment. Alignments are powers of two.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace tensorferry {

inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

inline constexpr std::size_t KiB = std::size_t{1} << 10;
inline constexpr std::size_t MiB = std::size_t{1} << 20;
inline constexpr std::size_t GiB = std::size_t{1} << 30;

// No file and no process holds more. Code that takes a size from outside refuses a larger one
// before it calculates with it: then the sum of two sizes, and align_up() of one, cannot wrap.
inline constexpr std::uint64_t bytes_max = (std::uint64_t{1} << 63) - 1;

// The page size of the running kernel: 4 KiB, on some aarch64 16 or 64 KiB. A function, because
// static objects of a program may need it before those of the library exist.
[[nodiscard]] inline std::size_t page_bytes() noexcept {
#if defined(__x86_64__)
  return 4 * KiB;
#else
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
#endif
}

template <class T>
[[nodiscard]] constexpr T align_down(T value, std::size_t alignment) noexcept {
  return value & ~static_cast<T>(alignment - 1);
}

template <class T>
[[nodiscard]] constexpr T align_up(T value, std::size_t alignment) noexcept {
  return align_down(static_cast<T>(value + alignment - 1), alignment);
}

[[nodiscard]] inline bool is_aligned(const void* address, std::size_t alignment) noexcept {
  return (reinterpret_cast<std::uintptr_t>(address) & (alignment - 1)) == 0;
}

}  // namespace tensorferry
