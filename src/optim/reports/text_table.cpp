#include "optim/reports/text_table.h"

#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>

namespace torchium::optim::detail {

std::string with_commas(int64_t value) {
  const std::string digits = std::to_string(value);
  std::string result;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) {
      result += ',';
    }
    result += digits[i];
  }
  return result;
}

void write_table(std::ostream& stream, const std::vector<std::vector<std::string>>& lines,
                 size_t left) {
  std::vector<size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], line[i].size());
    }
  }
  for (size_t row = 0; row < lines.size(); ++row) {
    std::ostringstream line;
    for (size_t i = 0; i < widths.size(); ++i) {
      const bool ends_line = i < left && i + 1 == widths.size();  // no spaces after it
      line << (i == 0 ? "" : "  ") << (i < left ? std::left : std::right)
           << std::setw(ends_line ? 0 : static_cast<int>(widths[i])) << lines[row][i];
    }
    stream << line.str() << (row + 1 < lines.size() ? "\n" : "");
  }
}

}  // namespace torchium::optim::detail
