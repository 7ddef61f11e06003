// What profilers see of a step: ranges, and the work that kernels announce.
#include "support/phase.h"
#include <torchium/gradients.h>
#include <torchium/linalg.h>
#include <torchium/optim/shampoo.h>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

namespace torchium {
namespace {

std::multiset<std::string> seen_ranges;
std::vector<int64_t> seen_numbers;

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
  const std::string name = function.name();
  if (name.starts_with("torchium::")) seen_ranges.insert(name);
  if (name == "torchium::work") {
    for (const c10::IValue& input : function.inputs()) seen_numbers.push_back(input.toInt());
  }
  return nullptr;
}

class Phases : public ::testing::Test {
 protected:
  void SetUp() override {
    seen_ranges.clear();
    seen_numbers.clear();
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&note).needsInputs(true));
  }
  void TearDown() override { at::removeCallback(callback_); }

 private:
  at::CallbackHandle callback_ = 0;
};

TEST_F(Phases, OfAStepAreRanges) {
  torch::nn::Linear layer(5, 4);
  optim::Shampoo optimizer(layer->parameters());
  layer(torch::ones({3, 5})).sum().backward();
  optimizer.step();
  for (const char* name : {"elementwise", "statistics", "roots", "precondition"}) {
    EXPECT_GE(seen_ranges.count(std::string("torchium::") + name), 1U) << name;
  }
}

TEST_F(Phases, OfLinearAlgebraAreRanges) {
  const auto I = torch::eye(60), b = torch::ones({60});
  const linalg::LinearOperator A(60, [](const at::Tensor& X) { return 2 * X; });
  linalg::lanczos(A, 2);
  linalg::arnoldi(A, 2);
  linalg::hutchinson_trace(I);
  linalg::hutchinson_diagonal(I);
  linalg::hutchpp(A);
  linalg::xdiag(A);
  linalg::logdet(A);
  linalg::cg(A, b);
  linalg::gmres(A, b);
  linalg::LinearOperator(I).solve(b);
  for (const char* name : {"lanczos", "arnoldi", "hutchinson_trace", "hutchinson_diagonal",
                           "hutchpp", "xdiag", "logdet", "cg", "gmres", "solve"}) {
    EXPECT_EQ(seen_ranges.count(std::string("torchium::") + name), 1U) << name;
  }
}

TEST_F(Phases, OfPerSampleQuantitiesAreRanges) {
  torch::nn::Linear layer(5, 4);
  const auto forward = [&](const at::Tensor& x) { return layer(x); };
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().sum();
  };
  gradients::per_sample_norms(*layer, forward, loss, torch::ones({3, 5}), torch::ones({3, 4}));
  EXPECT_EQ(seen_ranges.count("torchium::sample_capture"), 1U);
  EXPECT_EQ(seen_ranges.count("torchium::sample_norms"), 1U);
}

TEST_F(Phases, KernelsAnnounceOperationsAndBytes) {
  { const torchium::detail::KernelWork work(12, 34); }
  EXPECT_EQ(seen_ranges.count("torchium::work"), 1U);
  EXPECT_EQ(seen_numbers, (std::vector<int64_t>{12, 34}));
}

}  // namespace
}  // namespace torchium
