// memory_report() against the actual tensors.
#include "model_testing.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/adahessian.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/kfac_preconditioner.h"
#include "torchium/optim/natural_gradient.h"
#include "torchium/optim/shampoo.h"

#include <sstream>
#include <type_traits>

namespace torchium::testing {
namespace {

using optim::GroupMemory;
using optim::MemoryReport;
using optim::Shampoo;
using optim::ShampooOptions;
using torch::optim::OptimizerParamGroup;

int64_t bytes_of_state(const torch::optim::Optimizer& optimizer, const std::string& prefix) {
  int64_t bytes = 0;
  for (const auto& param : optimizer.param_groups()[0].params()) {
    for (const auto& [key, tensor] : state_tensors(optimizer, param)) {
      const bool is_other = key.ends_with("_start") && !prefix.empty();
      bytes += key.starts_with(prefix) && !is_other ? static_cast<int64_t>(tensor.nbytes()) : 0;
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
  EXPECT_NE(table.find("statistics           2,000        0  2,000\n"), std::string::npos) << table;
  EXPECT_NE(table.find("state per element     20.1      5.6   19.7"), std::string::npos) << table;
  EXPECT_EQ(table.find("momentum"), std::string::npos) << table;
}

template <typename Optimizer>
class MemoryReportOfAny : public ::testing::Test {};

using OtherOptimizers = ::testing::Types<optim::Adagrad, optim::AdaHessian, optim::KFAC,
                                         optim::KFACPreconditioner, optim::NaturalGradient>;
TYPED_TEST_SUITE(MemoryReportOfAny, OtherOptimizers);

TYPED_TEST(MemoryReportOfAny, IsTheSizeOfTheState) {
  constexpr bool kCaptures = std::is_base_of_v<optim::CapturingOptimizer, TypeParam>;
  auto model = make_mlp();
  auto optimizer = [&] {
    if constexpr (kCaptures) {
      return TypeParam(*model);
    } else {
      return TypeParam(model->parameters());
    }
  }();
  const GroupMemory before = optimizer.memory_report().total();
  const auto [inputs, targets] = make_batch(0, kMlpSample);
  cross_entropy(model->forward(inputs), targets)
      .backward({}, /*retain_graph=*/std::nullopt, /*create_graph=*/!kCaptures);
  optimizer.step();
  model->zero_grad();
  const MemoryReport report = optimizer.memory_report();
  EXPECT_EQ(report.total().state.total(), bytes_of_state(optimizer, ""));
  EXPECT_GT(report.total().state.total(), 0);
  EXPECT_EQ(before.state.total(), kCaptures ? 0 : report.total().state.total());
  int64_t of_parameters = 0;
  for (const auto& parameter : report.parameters) {
    of_parameters += parameter.state.total();
  }
  EXPECT_EQ(of_parameters, report.total().state.total());
  ASSERT_EQ(report.parameters.size(), model->parameters().size());
  EXPECT_EQ(report.parameters[1].name, kCaptures ? "0.bias" : "parameter 1 of group 0");
}

TEST(MemoryReport, CountsKeptBatchesAndTheirFactorisation) {
  auto model = make_mlp();
  optim::NaturalGradient optimizer(*model,
                                   optim::NaturalGradientOptions().update_freq(4).solver("gram"));
  const auto batch = make_batch(0, kMlpSample);
  train_on(optimizer, model, batch);
  const MemoryReport report = optimizer.memory_report();
  const int64_t samples = batch.inputs.size(0);
  EXPECT_GT(report.total().state.batches, 0);
  EXPECT_EQ(report.joint.workspace, samples * samples * 8);
  EXPECT_EQ(report.groups[0].workspace, 0);
}

}  // namespace
}  // namespace torchium::testing
