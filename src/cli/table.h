// A table of text with aligned columns.
#pragma once

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

}  // namespace tensorferry::cli
