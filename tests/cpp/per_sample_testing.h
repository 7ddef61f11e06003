// Compares what is computed from per-sample gradients with the same from explicit rows.
#pragma once

#include "model_testing.h"
#include "torchium/gradients.h"

#include <string>
#include <vector>

namespace torchium::testing {

// Norms, inner products and clipped sums of `rows`, the gradients of the samples by name. `.grad`
// is undefined afterwards.
inline void expect_quantities(const nn::Module& model, const ForwardFunction& forward,
                              const LossFunction& loss, const torch::Tensor& inputs,
                              const torch::Tensor& targets,
                              const torch::OrderedDict<std::string, torch::Tensor>& rows,
                              double tolerance = 1e-9) {
  Tensors flat;
  Tensors flat_vectors;
  torch::OrderedDict<std::string, torch::Tensor> vectors;
  for (const auto& [name, row] : rows.pairs()) {
    vectors.insert(name, torch::cos(torch::arange(row[0].numel(), row.options())).view_as(row[0]));
    flat.push_back(row.flatten(1).to(torch::kDouble));
    flat_vectors.push_back(vectors[name].flatten().to(torch::kDouble));
  }
  const auto J = torch::cat(flat, 1);
  const auto norms = J.norm(2, 1);
  for (const int64_t workspace : {int64_t{1}, int64_t{1} << 28}) {
    const auto again = per_sample_gradients(model, forward, loss, inputs, targets, workspace);
    for (const auto& [name, row] : rows.pairs()) {
      expect_near(again[name], row, tolerance);
    }
    expect_near(gradients::per_sample_norms(model, forward, loss, inputs, targets, workspace)
                    .to(torch::kDouble),
                norms, tolerance);
    const auto K = gradients::gram(model, forward, loss, inputs, targets, workspace);
    EXPECT_TRUE(torch::equal(K, K.t()));
    expect_near(K, J.mm(J.t()), tolerance);
    const auto dots =
        gradients::jvp_dots(model, forward, loss, inputs, targets, vectors, workspace);
    expect_near(dots.to(torch::kDouble), J.mv(torch::cat(flat_vectors)), tolerance);
  }
  const double limit = norms.median().item<double>() + 1e-6;
  expect_near(gradients::clip_and_accumulate(model, forward, loss, inputs, targets, limit)
                  .to(torch::kDouble),
              norms, tolerance);
  const auto factors = (limit / norms).clamp_max(1.0);
  const auto params = model.named_parameters();
  for (const auto& [name, row] : rows.pairs()) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(params[name].grad().defined());
    expect_near(params[name].grad().to(torch::kDouble),
                torch::tensordot(factors, row.to(torch::kDouble), {0}, {0}), tolerance);
  }
  for (const auto& param : model.parameters()) {
    param.mutable_grad() = torch::Tensor();
  }
}

}  // namespace torchium::testing
