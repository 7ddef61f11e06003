#include "torchium/optim/memory_report.h"

#include "optim/core/state_memory.h"
#include "optim/reports/text_table.h"

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace torchium::optim {
namespace {

std::string one_decimal(double value) {
  std::ostringstream stream;
  stream << std::fixed << std::setprecision(1) << value;
  return stream.str();
}

using Row = std::vector<std::string>;

// Of all columns; `cell` has the text of one.
template <typename Column, typename Cell>
Row make_row(const std::string& name, const std::vector<Column>& columns, const Cell& cell) {
  Row row{name};
  std::ranges::transform(columns, std::back_inserter(row), cell);
  return row;
}

Row row_of_bytes(const std::string& name, const std::vector<GroupMemory>& columns,
                 int64_t GroupMemory::*bytes) {
  return make_row(name, columns,
                  [&](const GroupMemory& group) { return detail::with_commas(group.*bytes); });
}

// Of the kinds that there are.
std::vector<Row> rows_of_state(const std::vector<GroupMemory>& columns) {
  std::vector<detail::NamedBytes> states;
  for (const GroupMemory& group : columns) {
    states.push_back(detail::numbers_of(group.state));
  }
  std::vector<Row> rows;
  for (size_t kind = 0; kind < states.back().size(); ++kind) {
    auto [name, total] = states.back()[kind];
    if (total > 0) {
      std::ranges::replace(name, '_', ' ');
      rows.push_back(make_row(name, states, [&](const detail::NamedBytes& state) {
        return detail::with_commas(state[kind].second);
      }));
    }
  }
  return rows;
}

std::string per_element(const GroupMemory& group) {
  return group.elements == 0 ? "-"
                             : one_decimal(static_cast<double>(group.state.total()) /
                                           static_cast<double>(group.elements));
}

}  // namespace

GroupMemory MemoryReport::total() const {
  GroupMemory sum = joint;
  for (const auto& group : groups) {
    sum += group;
  }
  return sum;
}

std::ostream& operator<<(std::ostream& stream, const MemoryReport& report) {
  std::vector<GroupMemory> columns = report.groups;
  columns.push_back(report.total());
  Row heading{"bytes"};
  for (size_t i = 0; i < report.groups.size(); ++i) {
    heading.push_back("group " + std::to_string(i));
  }
  heading.emplace_back("total");
  std::vector<Row> rows{heading, row_of_bytes("parameters", columns, &GroupMemory::parameters)};
  std::ranges::move(rows_of_state(columns), std::back_inserter(rows));
  rows.push_back(make_row("state", columns, [](const GroupMemory& group) {
    return detail::with_commas(group.state.total());
  }));
  rows.push_back(row_of_bytes("workspace", columns, &GroupMemory::workspace));
  rows.push_back(row_of_bytes("graphs", columns, &GroupMemory::graphs));
  rows.push_back(make_row("state per element", columns, per_element));
  detail::write_table(stream, rows, 1);
  return stream;
}

}  // namespace torchium::optim
