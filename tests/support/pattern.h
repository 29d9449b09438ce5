// Data that names its place: every 8 bytes of a file encode their offset and a seed, so that a
// wrong byte shows where it came from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tensorferry::support {

inline constexpr std::uint32_t pattern_seed_max = (1U << 16) - 1;

// The bytes of a file of pattern `seed` (at most pattern_seed_max) from `offset` on (below 2^50).
// Offset and length may be any number.
void fill_pattern(std::span<std::byte> memory, std::uint64_t offset, std::uint32_t seed);
[[nodiscard]] std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t offset,
                                             std::uint32_t seed);

// Empty if `memory` holds the pattern. Else names the first wrong byte, the number of wrong bytes
// and, if they are a pattern, their offset and seed.
[[nodiscard]] std::string pattern_fault(std::span<const std::byte> memory, std::uint64_t offset,
                                        std::uint32_t seed);

// Empty if every byte is `value`. Else names the first other one.
[[nodiscard]] std::string constant_fault(std::span<const std::byte> memory, std::uint64_t offset,
                                         std::byte value);

// These use plain system calls, not the library under test. Both throw std::system_error.
[[nodiscard]] std::vector<std::byte> read_whole_file(const std::string& path);
void write_whole_file(const std::string& path, std::span<const std::byte> bytes);

}  // namespace tensorferry::support
