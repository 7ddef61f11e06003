#include "optim/reports/text_table.h"
#include "torchium/optim/kfac.h"

#include <ostream>

namespace torchium::optim {

std::ostream& operator<<(std::ostream& stream, const KFACReport& report) {
  std::vector<std::vector<std::string>> table{{"parameter", "treatment", "detail"}};
  for (const auto& [name, treatment, detail] : report.parameters) {
    table.push_back({name, treatment, detail});
  }
  table.push_back({"graphs", "", detail::with_commas(report.graph_bytes) + " bytes"});
  detail::write_table(stream, table, table.front().size());
  return stream;
}

}  // namespace torchium::optim
