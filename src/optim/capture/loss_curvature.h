// The Hessian of a loss with respect to the outputs of the model, as columns for backward passes.
#pragma once

#include "torchium/optim/curvature_options.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torchium::optim::detail {

// Throws c10::Error for fisher "empirical", with which update_curvature() has no meaning.
void check_takes_curvature(const std::string& fisher);

// The column to which gradients belong.
struct CurvatureColumn {
  int64_t samples;  // of the model's outputs
  bool is_first;    // the inputs of layers count once
};

// Columns v, shaped as the outputs f of a model, with sum v v^T = H for each sample: H is the
// Hessian of the sample's loss with respect to its outputs, block-diagonal over the elements of the
// sample (tokens, pixels, units).
//   loss "cross_entropy"  sum_e w ce(f_e, y_e)      H_e = w (diag(p) - p p^T),  p = softmax(f_e)
//        "mse"            sum_e w (f_e - y_e)^2     H_e = 2 w
//        "bce"            sum_e w bce(f_e, y_e)     H_e = w p (1 - p),  p = sigmoid(f_e)
// with w = 1 for reduction "sum", and N / (the elements that count in the batch of N samples) for
// "mean"; 0 for masked elements. None of them depends on the targets.
//   fisher "ggn"  exact: one column per element, and class
//          "mc"   in expectation: v = sqrt(w / samples) times the gradient for a target drawn from
//                 the model's own distribution: softmax, N(f_e, 1/2), Bernoulli(p)
// No column mixes two samples. Does not wait for the device.
class LossCurvature {
 public:
  // ValueError for what does not fit.
  LossCurvature(const at::Tensor& outputs, std::string loss, const std::string& fisher,
                const CurvatureOptions& options);

  int64_t columns() const { return columns_; }
  bool is_sampled() const { return is_sampled_; }  // "mc"
  // Each column is requested once, in order.
  at::Tensor column(int64_t k) const;
  // In dimension 0 of the outputs.
  int64_t samples() const { return outputs_.size(0); }

 private:
  at::Tensor sampled() const;
  at::Tensor exact(int64_t k) const;

  at::Tensor outputs_;
  std::string loss_;
  bool is_sampled_;
  std::optional<at::Generator> generator_;
  int64_t class_dim_ = -1;  // of "cross_entropy"
  // In the state dtype: [N, elements, classes] for "cross_entropy", otherwise [N, elements, 1].
  at::Tensor logits_;
  at::Tensor p_;     // undefined for "mse"
  at::Tensor root_;  // sqrt(w), or sqrt(w / samples): [N, elements, 1] or [1, 1, 1]
  int64_t columns_;
};

}  // namespace torchium::optim::detail
