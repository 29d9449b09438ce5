// A table of text with aligned columns, and the numbers in it.
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

// The head, a rule and the rows, one line each. Widths count characters, not bytes.
[[nodiscard]] std::string table(const std::vector<Column>& columns,
                                const std::vector<std::vector<std::string>>& rows);

// How many decimals show three digits of a number: at least so many, more where it is small.
[[nodiscard]] int decimals_for(double value, int least) noexcept;

// The number with as many.
[[nodiscard]] std::string number_text(double value, int decimals_least);

}  // namespace tensorferry::cli
