#include "optim/adagrad/adagrad_step.h"

#include "optim/blocked/blocking.h"
#include "optim/blocked/preconditioner.h"
#include "optim/core/argument_checks.h"
#include "optim/core/found_inf_guard.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <limits>
#include <utility>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

// Blocks of the flattened parameters.
std::vector<Blocking> flat_blockings(at::TensorList params, int64_t block_size) {
  std::vector<Blocking> blockings;
  blockings.reserve(params.size());
  for (const auto& param : params) {
    // Not numel(), which a tensor with symbolic sizes does not have.
    blockings.push_back(make_blocking({c10::multiply_integers(param.sizes())}, block_size));
  }
  return blockings;
}

// lr / (1 + (t - 1) lr_decay)
StepScalar decayed_learning_rate(const AdagradHyperparameters& h, const at::Tensor& step,
                                 const StepScalar& lr) {
  if (h.lr_decay == 0.0) {
    return lr;
  }
  if (!lr.device.defined()) {
    return {lr.host / (1.0 + (count_on_cpu(step) - 1.0) * h.lr_decay), {}};
  }
  return {0.0, lr.device / ((step.to(at::kDouble) - 1.0) * h.lr_decay + 1.0)};
}

// s <- s + g^2; p <- p - lr g / (sqrt(s) + eps). The order of operations is torch.optim.Adagrad's.
void diagonal_update(const AdagradHyperparameters& h, at::Tensor param, const at::Tensor& g,
                     at::Tensor& sum, const StepScalar& lr, const FoundInfGuard& guard) {
  sum.addcmul_(g, g);
  at::Tensor root = sum.sqrt().add_(h.eps);
  if (h.eps == 0.0) {  // 0 / 0 becomes 0
    root.masked_fill_(root.eq(0), std::numeric_limits<double>::infinity());
  }
  if (!lr.device.defined() && param.scalar_type() == g.scalar_type()) {
    param.addcdiv_(g, root, -lr.host);
    if (lr.host > 1.0) {  // |g| / root <= 1: a smaller step ends within the numbers of the dtype
      const double most = largest_number(param.scalar_type());
      param.clamp_(-most, most);
    }
  } else {
    subtract_scaled_(param, guard.zero_if_skipped(g / root), lr);
  }
}

// G <- G + g g^T; R = (G + eps I)^(-1/2) when due; returns R g of every parameter.
Tensors full_matrix_directions(const AdagradHyperparameters& h, at::TensorList params,
                               const Tensors& g, AdagradState& state,
                               const std::vector<Blocking>& blockings,
                               std::vector<MatrixBatch>& batches, at::IntArrayRef host_steps,
                               const FoundInfGuard& guard) {
  const auto t = steps_on_host(state.steps, host_steps);
  std::vector<int64_t> due_steps;
  bool any_due = false;
  for (const int64_t step : t) {
    due_steps.push_back(root_is_due(step, 1, h.update_freq) ? step : 0);
    any_due |= due_steps.back() != 0;
  }
  const std::vector<StepScalar> no_correction(params.size());
  const RootRule rule{h.eps, 0.0, -0.5, h.root_method};
  Tensors blocks;
  for (auto& batch : batches) {
    blocks.push_back(pack(batch, blockings, g, {}));
    update_statistics(batch, blocks.back(), 1.0, guard);
  }
  if (any_due) {
    update_roots(batches, rule, due_steps, no_correction, guard);
    record_root_failures(batches, state.status);
  }
  Tensors directions(params.size());
  for (size_t b = 0; b < batches.size(); ++b) {
    unpack(batches[b], blockings, precondition(batches[b], blocks[b]), params, directions);
  }
  return directions;
}

}  // namespace

BlockStorage adagrad_init_state(at::TensorList params, int64_t block_size,
                                double initial_accumulator_value) {
  c10::NoGradGuard no_grad;
  BlockStorage storage = make_block_storage(params, flat_blockings(params, block_size));
  for (auto& statistics : storage.statistics) {
    statistics.diagonal(0, 1, 2).fill_(initial_accumulator_value);
  }
  return storage;
}

AdagradStep::AdagradStep(AdagradHyperparameters h, Tensors params, AdagradState state)
    : h_(std::move(h)), params_(std::move(params)), state_(std::move(state)) {
  if (params_.empty()) {
    return;
  }
  check_parameters(params_, state_.steps, state_.status);
  check_state_list(state_.sums, params_, !h_.full_matrix, "sums");
  if (h_.full_matrix) {
    blockings_ = flat_blockings(params_, h_.block_size);
    batches_ = find_batches(blockings_, {state_.statistics, state_.roots, state_.root_failures});
  }
  fused_ = FusedAdagrad::plan(h_, params_, state_);
}

bool AdagradStep::adopt(const AdagradHyperparameters& h) {
  const bool fits = h.full_matrix == h_.full_matrix && h.block_size == h_.block_size &&
                    h.weight_decay == h_.weight_decay;
  if (fits) {
    h_ = h;
  }
  return fits;
}

void AdagradStep::run(const at::Tensor& lr, at::TensorList grads, at::IntArrayRef host_steps,
                      const at::Tensor& found_inf) {
  c10::NoGradGuard no_grad;
  if (params_.empty()) {
    return;
  }
  const AdagradHyperparameters& h = h_;
  check_gradients(params_, grads);
  check_host_steps(host_steps, params_.size(), state_.status, h.full_matrix);
  if (fused_ != nullptr) {
    fused_->run(h, lr, grads, found_inf);
    return;
  }
  const std::vector<double> weight_decays(params_.size(), h.weight_decay);
  const FoundInfGuard guard = FoundInfGuard::check(
      examined_gradients(params_, grads, state_.steps, weight_decays), state_.status, found_inf);
  if (guard.skipped_on_host()) {
    return;
  }
  guard.advance(state_.steps);  // t <- t + 1
  Tensors g;
  for (size_t i = 0; i < params_.size(); ++i) {
    g.push_back(signed_gradient(params_[i], grads[i], h.maximize, h.weight_decay, guard));
  }
  const StepScalar rate = guard.learning_rate(lr);
  Tensors directions;
  if (h.full_matrix) {
    directions =
        full_matrix_directions(h, params_, g, state_, blockings_, batches_, host_steps, guard);
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    at::Tensor param = params_[i];
    const StepScalar decayed_lr = decayed_learning_rate(h, state_.steps[i], rate);
    if (h.full_matrix && directions[i].defined()) {
      subtract_scaled_(param, finite_entries(directions[i]), decayed_lr);
    } else if (!h.full_matrix) {
      diagonal_update(h, param, g[i], state_.sums[i], decayed_lr, guard);
    }
  }
}

}  // namespace torchium::optim::detail
