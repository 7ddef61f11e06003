// Shampoo::memory_report against the actual tensors.
#include "optimizer_testing.h"
#include "torchium/optim/shampoo.h"

#include <sstream>

namespace torchium::testing {
namespace {

using optim::GroupMemory;
using optim::MemoryReport;
using optim::Shampoo;
using optim::ShampooOptions;
using torch::optim::OptimizerParamGroup;

int64_t bytes_of_state(const Shampoo& optimizer, const std::string& prefix) {
  int64_t bytes = 0;
  for (const auto& param : optimizer.param_groups()[0].params()) {
    for (const auto& [key, tensor] : state_tensors(optimizer, param)) {
      bytes += key.rfind(prefix, 0) == 0 ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
  }
  return bytes;
}

class MemoryReportOf : public ::testing::TestWithParam<torch::Dtype> {};

TEST_P(MemoryReportOf, IsTheSizeOfTheState) {
  const Tensors params = odd_parameters(GetParam());
  Shampoo optimizer(params, ShampooOptions()
                                .block_size(4)
                                .betas(std::make_tuple(0.9, 0.99))
                                .momentum(0.9)
                                .grafting("adam"));
  const GroupMemory planned = optimizer.memory_report().total();
  EXPECT_TRUE(optimizer.state().empty());
  train(optimizer, params, 0, 1);
  const GroupMemory real = optimizer.memory_report().total();
  for (const auto& memory : {planned, real}) {
    EXPECT_EQ(memory.state.total(), bytes_of_state(optimizer, ""));
    EXPECT_EQ(memory.state.statistics, bytes_of_state(optimizer, "statistics"));
    EXPECT_EQ(memory.state.roots, bytes_of_state(optimizer, "roots."));
    EXPECT_EQ(memory.state.averages, bytes_of_state(optimizer, "exp_avg"));
    EXPECT_EQ(memory.state.grafting_second_moments, bytes_of_state(optimizer, "grafting"));
    EXPECT_EQ(memory.state.momentum_buffers, bytes_of_state(optimizer, "momentum"));
    EXPECT_EQ(memory.state.diagonals, bytes_of_state(optimizer, "diagonal"));
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, MemoryReportOf,
                         ::testing::Values(torch::kFloat, torch::kDouble, torch::kBFloat16));

TEST(MemoryReport, LeavesOutWhatGetsNoGradient) {
  const Tensors params{parameter(torch::ones({4, 4})), torch::ones({4, 4})};
  const auto memory = Shampoo(params).memory_report().total();
  EXPECT_EQ(memory.elements, 16);
  EXPECT_EQ(memory.parameters, 64);
  EXPECT_EQ(memory.state.statistics, 2 * 64);
}

TEST(MemoryReport, GroupsAddUpAndArePrinted) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{parameter(torch::ones({20, 10}))});
  groups.emplace_back(Tensors{parameter(torch::ones({5}))});
  const MemoryReport report = Shampoo(groups).memory_report();
  ASSERT_EQ(report.groups.size(), 2);
  EXPECT_EQ(report.total().state.total(),
            report.groups[0].state.total() + report.groups[1].state.total());
  std::ostringstream stream;
  stream << report;
  const std::string table = stream.str();
  EXPECT_NE(table.find("statistics                 2,000        0  2,000\n"), std::string::npos)
      << table;
  EXPECT_NE(table.find("state per element           20.1      5.6   19.7"), std::string::npos)
      << table;
}

}  // namespace
}  // namespace torchium::testing
