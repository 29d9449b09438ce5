// Tables of text with aligned columns, and numbers for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tensorferry::cli {

enum class Align : std::uint8_t { left, right };

struct Column {
  std::string title;
  Align align = Align::left;
};

// The head, a rule and the rows, each on one line. Widths count characters, not bytes.
[[nodiscard]] std::string table(const std::vector<Column>& columns,
                                const std::vector<std::vector<std::string>>& rows);

// How many decimals show three digits of a number, but at least `least`.
[[nodiscard]] int decimals_for(double value, int least) noexcept;

// The number with that many decimals.
[[nodiscard]] std::string number_text(double value, int decimals_least);

}  // namespace tensorferry::cli
