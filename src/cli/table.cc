#include "cli/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tensorferry::cli {

namespace {

std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

}  // namespace

std::string table(const std::vector<Column>& columns,
                  const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    std::size_t width = width_of(columns[i].title);
    for (const auto& row : rows) width = std::max(width, width_of(row.at(i)));
    widths.push_back(width);
  }
  const auto line = [&](const auto& cell_of) {
    std::string text;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const std::string& cell = cell_of(i);
      const std::string blanks(widths[i] - width_of(cell), ' ');
      text +=
          (i > 0 ? "  " : "") + (columns[i].align == Align::right ? blanks + cell : cell + blanks);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::string text = line([&](std::size_t i) -> const std::string& { return columns[i].title; });
  std::size_t rule = 2 * (columns.size() - 1);
  for (const std::size_t width : widths) rule += width;
  for (std::size_t i = 0; i < rule; ++i) text += "─";
  text += "\n";
  for (const auto& row : rows) {
    text += line([&](std::size_t i) -> const std::string& { return row[i]; });
  }
  return text;
}

int decimals_for(double value, int least) noexcept {
  constexpr int most = 9;
  if (!std::isnormal(value)) return least;
  return std::clamp(2 - static_cast<int>(std::floor(std::log10(std::abs(value)))), least, most);
}

std::string number_text(double value, int decimals_least) {
  return fmt::format("{:.{}f}", value, decimals_for(value, decimals_least));
}

}  // namespace tensorferry::cli
