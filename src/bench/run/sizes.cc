#include "bench/run/sizes.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

namespace tensorferry::bench {

namespace {

constexpr std::string_view letters = "KMGT";
constexpr std::string_view counts = "KMGTPE";

}  // namespace

std::optional<std::uint64_t> parse_size(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return {};
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  unsigned shift = 0;
  if (!unit.empty()) {
    const auto power =
        letters.find(static_cast<char>(std::toupper(static_cast<unsigned char>(unit.front()))));
    if (power != std::string_view::npos) {
      shift = static_cast<unsigned>(10 * (power + 1));
      unit.remove_prefix(1);
      if (unit.starts_with('i')) unit.remove_prefix(1);
    }
    if (unit == "B" || unit == "b") unit.remove_prefix(1);
  }
  if (!unit.empty() || value > (std::uint64_t{1} << (63 - shift)) - 1) return {};
  return value << shift;
}

std::optional<double> parse_count(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return {};
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (unit == "B" || unit == "b") {
    value *= 1e9;
  } else if (!unit.empty()) {
    const auto power =
        counts.find(static_cast<char>(std::toupper(static_cast<unsigned char>(unit.front()))));
    if (unit.size() > 1 || power == std::string_view::npos) return {};
    value *= std::pow(1000, static_cast<double>(power + 1));
  }
  // Also of a number that its unit makes infinite, and of nan.
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

std::string size_text(std::uint64_t bytes) {
  for (std::size_t power = letters.size(); power > 0 && bytes > 0; --power) {
    const std::uint64_t unit = std::uint64_t{1} << (10 * power);
    if (bytes % unit == 0) return fmt::format("{}{}", bytes / unit, letters[power - 1]);
  }
  return std::to_string(bytes);
}

std::string rounded_size(std::uint64_t bytes) {
  static constexpr std::array units{"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  const bool whole = unit == 0 || value == static_cast<double>(static_cast<std::uint64_t>(value));
  return fmt::format("{:.{}f} {}", value, whole ? 0 : 1, units[unit]);
}

std::string rounded_count(double count) {
  static constexpr std::array units{"", " k", " M", " G", " T", " P", " E"};
  std::size_t unit = 0;
  while (count >= 999.5 && unit + 1 < units.size()) {
    count /= 1000;
    ++unit;
  }
  const int decimals = count >= 99.95 || (unit == 0 && count == std::floor(count)) ? 0
                       : count >= 9.995                                            ? 1
                                                                                   : 2;
  return fmt::format("{:.{}f}{}", count, decimals, units[unit]);
}

}  // namespace tensorferry::bench
