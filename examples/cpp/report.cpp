#include "report.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>

namespace {

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[64];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

using Row = std::vector<std::string>;

Row make_row(const Result& result, double target) {
  const Record& last = result.curve.back();
  const auto reached = result.first_below(target);
  return {result.label,
          format("%.4g", last.loss),
          format("%.2f%%", 100.0 * result.test_accuracy),
          std::to_string(last.steps),
          format("%.1f", last.seconds),
          format("%.2f", 1000.0 * last.seconds / static_cast<double>(last.steps)),
          reached ? std::to_string(reached->steps) : "-",
          reached ? format("%.1f", reached->seconds) : "-"};
}

}  // namespace

void print_table(std::ostream& out, const std::vector<Result>& results, double target) {
  std::vector<Row> rows{{"optimizer", "final loss", "test accuracy", "steps", "seconds",
                         "ms per step", format("steps to %g", target),
                         format("seconds to %g", target)}};
  for (const auto& result : results) {
    rows.push_back(make_row(result, target));
  }
  for (const auto& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) {
      size_t width = 0;
      for (const auto& other : rows) {
        width = std::max(width, other[column].size());
      }
      const std::string padding(width - row[column].size(), ' ');
      out << (column == 0 ? row[column] + padding : "  " + padding + row[column]);
    }
    out << '\n';
  }
}

void write_curves(const std::filesystem::path& path, const std::vector<Result>& results) {
  std::ofstream file(path);
  file << "optimizer,steps,seconds,loss\n";
  for (const auto& result : results) {
    for (const auto& record : result.curve) {
      file << result.label << ',' << record.steps << ',' << record.seconds << ',' << record.loss
           << '\n';
    }
  }
  if (!file.flush()) {
    throw std::runtime_error("cannot write " + path.string());
  }
}
