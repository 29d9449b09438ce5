// Sizes as people write them: 4K, 2M, 1G, binary.
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

// "512", "4K", "2m", "1G", "16MiB", "2T"; nothing for any other text and for what 63 bits do not
// hold.
[[nodiscard]] std::optional<std::uint64_t> parse_size(std::string_view text);

// The shortest exact form that parse_size takes: "4K", "2M", "1000".
[[nodiscard]] std::string size_text(std::uint64_t bytes);

// For people, rounded: "1.5 GiB".
[[nodiscard]] std::string rounded_size(std::uint64_t bytes);

}  // namespace tensorferry::bench
