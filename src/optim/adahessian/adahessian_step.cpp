#include "optim/adahessian/adahessian_step.h"

#include "optim/core/argument_checks.h"
#include "support/phase.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace torchium::optim::detail {

AdaHessianStep::AdaHessianStep(const AdaHessianOptions& options, std::vector<at::Tensor> params,
                               StateList states, at::Tensor status)
    : options_(options), params_(std::move(params)), states_(std::move(states)) {
  prologue_ = StepPrologue::make(params_, states_, std::move(status), /*weight_decay=*/0.0);
  read_by_operators_.resize(params_.size());
  std::iota(read_by_operators_.begin(), read_by_operators_.end(), 0);
}

void AdaHessianStep::run(const at::Tensor& lr, at::IntArrayRef, const at::Tensor& found_inf) {
  const torchium::detail::Phase phase("torchium::elementwise");
  for (size_t i = 0; i < diagonals_.size(); ++i) {
    const at::Tensor& diagonal = diagonals_[i];
    if (diagonal.defined()) {
      prologue_->examine(diagonal, i, largest_gradient(diagonal.numel(), diagonal.scalar_type()));
    }
  }
  if (!prologue_->run(StepRule{}, found_inf)) {  // t <- t + 1, unless it is skipped
    return;
  }
  const FoundInfGuard guard = prologue_->guard();
  const StepScalar kept_lr = guard.learning_rate(lr);
  for (size_t i = 0; i < params_.size(); ++i) {
    update(i, guard, kept_lr);
  }
}

// m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) D^2;
// p <- (1 - lr weight_decay) p - lr (m / c1) / ((v / c2)^(k/2) + eps), c = 1 - beta^t
void AdaHessianStep::update(size_t i, const FoundInfGuard& guard, const StepScalar& lr) {
  const auto [beta1, beta2] = options_.betas();
  ParameterState& state = states_[i];
  if (i < diagonals_.size() && diagonals_[i].defined()) {
    guard.assign_(state.hessian_diagonal, diagonals_[i]);
  }
  const at::Tensor g =
      signed_gradient(params_[i], grads_[i], /*maximize=*/false, /*weight_decay=*/0.0, guard);
  guard.lerp_(state.exp_avg, g, 1.0 - beta1);
  guard.lerp_(state.exp_hessian_diag_sq, state.hessian_diagonal.square(), 1.0 - beta2);
  const StepScalar c1 = bias_correction(beta1, state.step, state.exp_avg_start);
  const StepScalar c2 = bias_correction(beta2, state.step, {});
  const at::Tensor denominator =
      c2.divide(state.exp_hessian_diag_sq).pow(options_.hessian_power() / 2).add_(options_.eps());
  const at::Tensor direction = guard.zero_if_skipped(c1.divide(state.exp_avg) / denominator);
  decay_(params_[i], options_.weight_decay(), lr);
  subtract_scaled_(params_[i], direction, lr);
}

std::optional<GraphKey> AdaHessianStep::graph_key(at::IntArrayRef) const {
  GraphKey key;
  prologue_->add_to(key);
  for (const at::Tensor& diagonal : diagonals_) {
    key.push_back(static_cast<uint8_t>(diagonal.defined()));
  }
  return key;
}

std::vector<at::Tensor> AdaHessianStep::inputs() {
  std::vector<at::Tensor> inputs = PrologueStep::inputs();
  std::ranges::copy_if(diagonals_, std::back_inserter(inputs),
                       [](const at::Tensor& diagonal) { return diagonal.defined(); });
  return inputs;
}

void AdaHessianStep::set_inputs(at::TensorList inputs) {
  PrologueStep::set_inputs(inputs);
  size_t next = params_.size();
  for (at::Tensor& diagonal : diagonals_) {
    if (diagonal.defined()) {
      diagonal = inputs[next++];
    }
  }
}

void AdaHessianStep::end() {
  diagonals_.clear();
  PrologueStep::end();
}

}  // namespace torchium::optim::detail
