#include "torchium/optim/shampoo_report.h"

#include "optim/reports/text_table.h"

#include <ostream>
#include <sstream>

namespace torchium::optim {
namespace {

// "50000x768"; "scalar" for a tensor of order 0
std::string text_of(const std::vector<int64_t>& shape) {
  if (shape.empty()) {
    return "scalar";
  }
  std::ostringstream text;
  for (size_t i = 0; i < shape.size(); ++i) {
    text << (i == 0 ? "" : "x") << shape[i];
  }
  return text.str();
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, const ShampooReport& report) {
  std::vector<std::vector<std::string>> table{
      {"parameter", "shape", "rule", "detail", "bytes of state"}};
  int64_t bytes = 0;
  for (const auto& parameter : report.parameters) {
    bytes += parameter.state_bytes;
    table.push_back({parameter.name, text_of(parameter.shape), parameter.rule, parameter.detail,
                     detail::with_commas(parameter.state_bytes)});
  }
  table.push_back({"total", "", "", "", detail::with_commas(bytes)});
  detail::write_table(stream, table, 4);
  return stream;
}

}  // namespace torchium::optim
