// Tables of reports.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// "1234567" -> "1,234,567"
std::string with_commas(int64_t value);

// Lines of cells; the first `left` columns are left-aligned.
void write_table(std::ostream& stream, const std::vector<std::vector<std::string>>& lines,
                 size_t left);

}  // namespace torchium::optim::detail
