#include "optim/reports/text_table.h"
#include "torchium/optim/natural_gradient.h"

#include <ostream>
#include <sstream>

namespace torchium::optim {

std::ostream& operator<<(std::ostream& stream, const NaturalGradientReport& report) {
  if (report.solver.empty()) {
    return stream << "no step yet";
  }
  std::vector<std::vector<std::string>> table{{"solver", report.solver},
                                              {"samples", detail::with_commas(report.samples)},
                                              {"rows", detail::with_commas(report.rows)}};
  if (report.solver == "cg") {
    std::ostringstream residual;
    residual << report.relative_residual;
    table.push_back({"iterations", detail::with_commas(report.iterations)});
    table.push_back({"relative residual", residual.str()});
  }
  table.push_back({"graphs", detail::with_commas(report.graph_bytes) + " bytes"});
  detail::write_table(stream, table, table.front().size());
  return stream;
}

}  // namespace torchium::optim
