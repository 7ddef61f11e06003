// Shared by the tests of K-FAC.
#pragma once

#include "model_testing.h"
#include "torchium/optim/kfac.h"

#include <cmath>
#include <string>

namespace torchium::testing {

using optim::KFAC;
using optim::KFACOptions;
using optim::KFACParamState;

inline const KFACParamState& kfac_state(const KFAC& optimizer, const torch::Tensor& param) {
  return static_cast<const KFACParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

// Steps first..last-1, each on a new batch.
inline void train(KFAC& optimizer, nn::Sequential& model, torch::IntArrayRef sample, int first,
                  int last) {
  const auto dtype = model->parameters()[0].scalar_type();
  for (int step = first; step < last; ++step) {
    train_on(optimizer, model, make_batch(step, sample, 6, dtype));
  }
}

inline void expect_near_each(const Tensors& actual, const Tensors& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(i);
    expect_near(actual[i].detach(), expected[i].detach(), tolerance);
  }
}

// (G (x) A + ...)^-1 V for one layer, by solves with dense matrices.
inline torch::Tensor reference_direction(const torch::Tensor& A, const torch::Tensor& G,
                                         const torch::Tensor& V, double damping,
                                         const std::string& split) {
  const auto I_A = torch::eye(A.size(0), A.options());
  const auto I_G = torch::eye(G.size(0), G.options());
  if (split == "exact") {
    const auto F = torch::kron(G, A) + damping * torch::eye(V.numel(), V.options());
    return torch::linalg_solve(F, V.reshape({-1})).view_as(V);
  }
  const double pi =
      split == "plain" ? 1.0
                       : std::sqrt(A.diag().mean().item<double>() / G.diag().mean().item<double>());
  const auto left = torch::linalg_solve(G + std::sqrt(damping) / pi * I_G, V);
  return torch::linalg_solve(A + std::sqrt(damping) * pi * I_A, left, /*left=*/false);
}

// A step with lr = 1 by the dense Fisher matrix of one sample, of each layer of weight and bias.
inline void expect_step_of_dense_fisher(const Tensors& before, const Tensors& params,
                                        double damping) {
  for (size_t i = 0; i < params.size(); i += 2) {
    const auto g = torch::cat({params[i].grad().reshape({-1}), params[i + 1].grad()});
    const auto F = g.outer(g) + damping * torch::eye(g.numel(), g.options());
    const auto expected = torch::linalg_solve(F, g);
    const auto weight_step = (before[i] - params[i].detach()).reshape({-1});
    const auto actual = torch::cat({weight_step, before[i + 1] - params[i + 1].detach()});
    EXPECT_LT((actual - expected).norm().item<double>(), 1e-6 * expected.norm().item<double>());
  }
}

inline KFAC make_kfac(const nn::Sequential& model, const std::string& split) {
  return KFAC(*model, KFACOptions(0.05).TCov(2).TInv(3).damping_split(split));
}

// Steps 0..pause-1, an archive, and steps pause..last-1 in another optimizer are as good as
// all in one.
inline void expect_archive_continues(const KFACOptions& options, int pause, int last) {
  auto model = make_convnet(torch::kFloat);
  KFAC optimizer(*model, options);
  const Warnings warnings;
  train(optimizer, model, kImageSample, 0, pause);
  const auto data = saved(optimizer);
  auto resumed_model = make_convnet(torch::kFloat);
  copy_parameters(*model, *resumed_model);
  train(optimizer, model, kImageSample, pause, last);

  KFAC resumed(*resumed_model, KFACOptions(0.1));  // the options are in the archive
  load(resumed, data);
  train(resumed, resumed_model, kImageSample, pause, last);
  expect_equal(copies(resumed_model->parameters()), copies(model->parameters()));
  expect_equal(all_state(resumed), all_state(optimizer));
}

// Over the values of damping_split.
class Splits : public ::testing::TestWithParam<std::string> {};

}  // namespace torchium::testing
