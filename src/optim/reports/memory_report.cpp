#include "torchium/optim/memory_report.h"

#include "optim/reports/state_memory.h"
#include "optim/reports/text_table.h"

#include <functional>
#include <iomanip>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace torchium::optim {
namespace {

struct Row {
  const char* name;
  std::function<int64_t(const GroupMemory&)> bytes;
};

const std::vector<Row>& rows() {
  static const std::vector<Row> all{
      {"parameters", [](const auto& g) { return g.parameters; }},
      {"statistics", [](const auto& g) { return g.state.statistics; }},
      {"roots", [](const auto& g) { return g.state.roots; }},
      {"averages", [](const auto& g) { return g.state.averages; }},
      {"grafting second moments", [](const auto& g) { return g.state.grafting_second_moments; }},
      {"momentum buffers", [](const auto& g) { return g.state.momentum_buffers; }},
      {"diagonals", [](const auto& g) { return g.state.diagonals; }},
      {"counters", [](const auto& g) { return g.state.counters; }},
      {"state", [](const auto& g) { return g.state.total(); }},
      {"graphs", [](const auto& g) { return g.graphs; }},
  };
  return all;
}

std::string one_decimal(double value) {
  std::ostringstream stream;
  stream << std::fixed << std::setprecision(1) << value;
  return stream.str();
}

}  // namespace

int64_t StateMemory::total() const {
  return statistics + roots + averages + grafting_second_moments + momentum_buffers + diagonals +
         counters;
}

StateMemory& StateMemory::operator+=(const StateMemory& other) {
  statistics += other.statistics;
  roots += other.roots;
  averages += other.averages;
  grafting_second_moments += other.grafting_second_moments;
  momentum_buffers += other.momentum_buffers;
  diagonals += other.diagonals;
  counters += other.counters;
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
  const std::pair<const char*, int64_t StateMemory::*> kinds[] = {
      {"statistics", &StateMemory::statistics},
      {"root_failures", &StateMemory::counters},
      {"roots", &StateMemory::roots},
      {"step", &StateMemory::counters},
      {"exp_avg_start", &StateMemory::counters},
      {"grafting_second_moment_start", &StateMemory::counters},
      {"diagonal", &StateMemory::diagonals},
      {"exp_avg", &StateMemory::averages},
      {"grafting_second_moment", &StateMemory::grafting_second_moments},
      {"momentum_buffer", &StateMemory::momentum_buffers}};
  StateMemory memory;
  for (const auto& [key, tensor] : state.named()) {
    const std::string name = key.substr(0, key.find('.'));  // "roots.0" -> "roots"
    for (const auto& [kind, member] : kinds) {
      if (name == kind) {
        memory.*member += static_cast<int64_t>(tensor.nbytes());
      }
    }
  }
  return memory;
}

}  // namespace detail

std::ostream& operator<<(std::ostream& stream, const MemoryReport& report) {
  std::vector<std::vector<std::string>> table{{"bytes"}};  // lines of cells
  for (const auto& row : rows()) {
    table.push_back({row.name});
  }
  table.push_back({"state, bytes a number"});
  const auto add_column = [&](const std::string& name, const GroupMemory& group) {
    auto line = table.begin();
    (line++)->push_back(name);
    for (const auto& row : rows()) {
      (line++)->push_back(detail::with_commas(row.bytes(group)));
    }
    line->push_back(group.elements == 0 ? "-"
                                        : one_decimal(static_cast<double>(group.state.total()) /
                                                      static_cast<double>(group.elements)));
  };
  for (size_t i = 0; i < report.groups.size(); ++i) {
    add_column("group " + std::to_string(i), report.groups[i]);
  }
  add_column("total", report.total());
  detail::write_table(stream, table, 1);
  return stream;
}

}  // namespace torchium::optim
