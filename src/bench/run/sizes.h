// Sizes as people write them, in binary units: 4K, 2M, 1G; and counts, in decimal ones: 70B.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tensorferry::bench {

inline constexpr std::size_t KiB = std::size_t{1} << 10;
inline constexpr std::size_t MiB = std::size_t{1} << 20;
inline constexpr std::size_t GiB = std::size_t{1} << 30;
inline constexpr std::size_t page_bytes = 4 * KiB;

// Parses "512", "4K", "2m", "1G", "16MiB", "2T". Nothing for other text and for sizes over 63 bits.
[[nodiscard]] std::optional<std::uint64_t> parse_size(std::string_view text);

// Parses counts and rates, in decimal units: "70B", "1.5G", "3.84T", "4e14". Nothing for other text
// and for numbers that are negative or not finite.
[[nodiscard]] std::optional<double> parse_count(std::string_view text);

// The shortest exact text for parse_size: "4K", "2M", "1000".
[[nodiscard]] std::string size_text(std::uint64_t bytes);

// Rounded, for people: "1.5 GiB".
[[nodiscard]] std::string rounded_size(std::uint64_t bytes);

// Three digits of a count, for people: "70.6 G".
[[nodiscard]] std::string rounded_count(double count);

}  // namespace tensorferry::bench
