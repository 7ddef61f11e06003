#include "torchium/optim/memory_report.h"

#include "optim/reports/state_memory.h"
#include "optim/reports/text_table.h"

#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace torchium::optim {
namespace {

struct Kind {
  const char* name;
  int64_t StateMemory::*bytes;
  std::vector<std::string> keys;  // of the state, without slots
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {"statistics", &StateMemory::statistics, {"statistics"}},
      {"roots", &StateMemory::roots, {"roots"}},
      {"averages", &StateMemory::averages, {"exp_avg"}},
      {"grafting second moments",
       &StateMemory::grafting_second_moments,
       {"grafting_second_moment"}},
      {"momentum buffers", &StateMemory::momentum_buffers, {"momentum_buffer"}},
      {"diagonals", &StateMemory::diagonals, {"diagonal"}},
      {"counters",
       &StateMemory::counters,
       {"step", "exp_avg_start", "grafting_second_moment_start", "root_failures"}},
  };
  return all;
}

std::string one_decimal(double value) {
  std::ostringstream stream;
  stream << std::fixed << std::setprecision(1) << value;
  return stream.str();
}

// Rows of the table, with the heading of the column.
std::vector<std::string> column(const std::string& heading, const GroupMemory& group) {
  std::vector<std::string> cells{heading, detail::with_commas(group.parameters)};
  for (const Kind& kind : kinds()) {
    cells.push_back(detail::with_commas(group.state.*kind.bytes));
  }
  cells.push_back(detail::with_commas(group.state.total()));
  cells.push_back(detail::with_commas(group.graphs));
  cells.push_back(group.elements == 0 ? "-"
                                      : one_decimal(static_cast<double>(group.state.total()) /
                                                    static_cast<double>(group.elements)));
  return cells;
}

}  // namespace

int64_t StateMemory::total() const {
  int64_t bytes = 0;
  for (const Kind& kind : kinds()) {
    bytes += this->*kind.bytes;
  }
  return bytes;
}

StateMemory& StateMemory::operator+=(const StateMemory& other) {
  for (const Kind& kind : kinds()) {
    this->*kind.bytes += other.*kind.bytes;
  }
  return *this;
}

GroupMemory MemoryReport::total() const {
  GroupMemory sum;
  for (const auto& group : groups) {
    sum.elements += group.elements;
    sum.parameters += group.parameters;
    sum.state += group.state;
    sum.graphs += group.graphs;
  }
  return sum;
}

namespace detail {

StateMemory memory_of(const ParameterState& state) {
  StateMemory memory;
  for (const auto& [key, tensor] : state.named()) {
    const std::string name = key.substr(0, key.find('.'));  // "roots.0" -> "roots"
    for (const Kind& kind : kinds()) {
      if (std::ranges::find(kind.keys, name) != kind.keys.end()) {
        memory.*kind.bytes += static_cast<int64_t>(tensor.nbytes());
      }
    }
  }
  return memory;
}

}  // namespace detail

std::ostream& operator<<(std::ostream& stream, const MemoryReport& report) {
  std::vector<std::string> names{"bytes", "parameters"};
  for (const Kind& kind : kinds()) {
    names.emplace_back(kind.name);
  }
  names.insert(names.end(), {"state", "graphs", "state per element"});
  std::vector<std::vector<std::string>> columns{names};
  for (size_t i = 0; i < report.groups.size(); ++i) {
    columns.push_back(column("group " + std::to_string(i), report.groups[i]));
  }
  columns.push_back(column("total", report.total()));
  std::vector<std::vector<std::string>> lines(names.size());
  for (const auto& cells : columns) {
    for (size_t row = 0; row < cells.size(); ++row) {
      lines[row].push_back(cells[row]);
    }
  }
  detail::write_table(stream, lines, 1);
  return stream;
}

}  // namespace torchium::optim
