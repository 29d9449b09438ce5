// Data that knows its place: every 8 bytes of a file encode their own offset and a seed, so that a
// wrong byte tells where it came from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tensorferry::support {

inline constexpr std::uint32_t pattern_seed_max = (1U << 16) - 1;

// What a file of pattern `seed` (at most pattern_seed_max) holds from `offset` on (below 2^50).
// Neither the offset nor the length has to be a multiple of 8.
void fill_pattern(std::span<std::byte> memory, std::uint64_t offset, std::uint32_t seed);
[[nodiscard]] std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t offset,
                                             std::uint32_t seed);

// Empty if `memory` is what fill_pattern() makes; else says where the first wrong byte is, how many
// there are and, where it can be told, from which offset and seed the wrong bytes come.
[[nodiscard]] std::string pattern_fault(std::span<const std::byte> memory, std::uint64_t offset,
                                        std::uint32_t seed);

// Empty if every byte is `value`; else says where the first other one is.
[[nodiscard]] std::string constant_fault(std::span<const std::byte> memory, std::uint64_t offset,
                                         std::byte value);

// Plain system calls that know nothing of the library under test. Both throw std::system_error.
[[nodiscard]] std::vector<std::byte> read_whole_file(const std::string& path);
void write_whole_file(const std::string& path, std::span<const std::byte> bytes);

}  // namespace tensorferry::support
