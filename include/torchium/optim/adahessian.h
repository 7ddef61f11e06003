// AdaHessian (Yao et al. 2021, AAAI, arXiv 2006.00719) as a libtorch optimizer.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/blocked_optimizer.h"
#include "torchium/optim/options.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace torchium::optim {

/// Options of AdaHessian; names and defaults are those of Python's `torchium.AdaHessian`.
struct TORCHIUM_API AdaHessianOptions : public OptionsOf<AdaHessianOptions> {
  AdaHessianOptions(double lr = 0.15);
  /// Learning rate, >= 0.
  TORCH_ARG(double, lr) = 0.15;
  using betas_t = std::tuple<double, double>;
  /// Decay of the averages of the gradient and of the squared diagonal, in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the denominator, > 0.
  TORCH_ARG(double, eps) = 1e-4;
  /// Decoupled weight decay, >= 0.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// Exponent k of the diagonal, in [0, 1].
  TORCH_ARG(double, hessian_power) = 1.0;
  /// Steps between two estimates of the diagonal, >= 1.
  TORCH_ARG(int64_t, update_each) = 1;
  /// Random vectors per estimate, >= 1; each costs a backward pass through the gradient.
  TORCH_ARG(int64_t, n_samples) = 1;
  /// On a GPU, what follows the estimate is captured in CUDA graphs after some steps, and replayed:
  /// the same results with less work for the host. "auto": where the memory that the graphs keep is
  /// at most 5 % of the state or 1 % of that of the device; "always"; "never".
  TORCH_ARG(std::string, graphs) = "auto";
};
extern template struct OptionsOf<AdaHessianOptions>;

/// State of one parameter. All have its shape and the state dtype.
struct TORCHIUM_API AdaHessianParamState : public MatrixParamState {
  /// The last estimate of the diagonal.
  TORCH_ARG(at::Tensor, hessian_diagonal);
  TORCH_ARG(at::Tensor, exp_avg);
  /// `step` when exp_avg began, if a checkpoint lacked it.
  TORCH_ARG(at::Tensor, exp_avg_start);
  /// Average of the squared diagonal.
  TORCH_ARG(at::Tensor, exp_hessian_diag_sq);

 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  std::vector<NamedTensor> parameter_shaped() override;
  std::vector<NamedTensor> counts() override;

 protected:
  bool consists_of(const detail::ParameterState& tensors) const override;
};

/// Adam with the diagonal of the Hessian in place of the gradient in the second moment:
///   D = |mean of z (H z)|, averaged over the kernel of a convolution
///   m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) D^2
///   p <- (1 - lr weight_decay) p - lr m' / (v'^(k/2) + eps)
/// with random signs z and m', v' the averages without their bias.
///
/// The backward pass must keep its graph: `loss.backward({}, std::nullopt, /*create_graph=*/true)`.
/// step() frees it. The gradients still refer to their parameters, about which libtorch warns. Call
/// zero_grad(), which sets them to undefined, after every step, including the last. Otherwise a
/// model that is no longer used stays in memory. Every operation of the model needs a second
/// derivative, which libtorch lacks for fused attention and EmbeddingBag. A diagonal that is not
/// finite skips the step, as a gradient does. The signs come from a seed of libtorch's default
/// generator of the CPU. Cannot be captured in a CUDA graph.
///
/// step() throws c10::ValueError, and changes no parameter, if no gradient has a graph. It warns
/// once if some gradients have none and are not zero: their D is 0, and where v is also 0 their
/// step is lr m' / eps. To find out whether they are zero, it waits for the device.
class TORCHIUM_API AdaHessian : public BlockedOptimizer {
 public:
  explicit AdaHessian(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                      AdaHessianOptions defaults = {});
  explicit AdaHessian(std::vector<at::Tensor> params, AdaHessianOptions defaults = {});

 protected:
  std::unique_ptr<SecondOrderParamState> make_empty_state() const override;
  c10::intrusive_ptr<detail::BlockedPlans> make_plans() const override;
  const char* name() const override { return "AdaHessian"; }
};

}  // namespace torchium::optim
