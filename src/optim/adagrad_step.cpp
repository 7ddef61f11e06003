#include "optim/adagrad_step.h"

#include "optim/blocking.h"
#include "optim/preconditioner.h"
#include "optim/step_gate.h"
#include "optim/step_inputs.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <limits>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

// Blocks of the flattened parameters.
std::vector<Blocking> flat_blockings(at::TensorList params, int64_t block_size) {
  std::vector<Blocking> blockings;
  blockings.reserve(params.size());
  for (const auto& param : params) {
    // Not numel(), which a tensor with symbolic sizes does not answer.
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
    return {lr.host / (1.0 + (step.item<double>() - 1.0) * h.lr_decay), {}};
  }
  return {0.0, lr.device / ((step.to(at::kDouble) - 1.0) * h.lr_decay + 1.0)};
}

// s <- s + g^2; p <- p - lr g / (sqrt(s) + eps). The order of operations is torch.optim.Adagrad's.
void diagonal_update(const AdagradHyperparameters& h, at::Tensor param, const at::Tensor& g,
                     at::Tensor& sum, const StepScalar& lr, const StepGate& gate) {
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
    subtract_scaled_(param, gate.zero_if_skipped(g / root), lr);
  }
}

// G <- G + g g^T; R = (G + eps I)^(-1/2) when due; returns R g of every parameter.
Tensors full_matrix_directions(const AdagradHyperparameters& h, at::TensorList params,
                               const Tensors& g, AdagradState& state,
                               const std::vector<Blocking>& blockings,
                               std::vector<MatrixBatch>& batches, at::IntArrayRef host_steps,
                               const StepGate& gate) {
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
    update_statistics(batch, blocks.back(), 1.0, gate);
  }
  if (any_due) {
    update_roots(batches, rule, due_steps, no_correction, gate);
    record_root_failures(batches, state.status);
  }
  Tensors directions(params.size());
  for (size_t b = 0; b < batches.size(); ++b) {
    unpack(batches[b], blockings, precondition(batches[b], blocks[b]), params, directions);
  }
  return directions;
}

}  // namespace

MatrixStacks adagrad_init_state(at::TensorList params, int64_t block_size,
                                double initial_accumulator_value) {
  c10::NoGradGuard no_grad;
  MatrixStacks stacks = make_stacks(params, flat_blockings(params, block_size));
  for (auto& statistics : stacks.statistics) {
    statistics.diagonal(0, 1, 2).fill_(initial_accumulator_value);
  }
  return stacks;
}

void adagrad_step(const AdagradHyperparameters& h, at::TensorList params, at::TensorList grads,
                  AdagradState& state, at::IntArrayRef host_steps) {
  c10::NoGradGuard no_grad;
  if (params.empty()) {
    return;
  }
  check_step_arguments(params, grads, state.steps, state.status, host_steps, h.full_matrix);
  check_state_list(state.sums, params, !h.full_matrix, "sums");
  std::vector<Blocking> blockings;
  std::vector<MatrixBatch> batches;
  if (h.full_matrix) {
    blockings = flat_blockings(params, h.block_size);
    batches = find_batches(blockings, {state.statistics, state.roots, state.root_failures});
  }
  const std::vector<double> weight_decays(params.size(), h.weight_decay);
  const StepGate gate =
      StepGate::check(examined_gradients(params, grads, state.steps, weight_decays), state.status);
  if (gate.skipped_on_host()) {
    return;
  }
  gate.advance(state.steps);  // t <- t + 1
  Tensors g;
  for (size_t i = 0; i < params.size(); ++i) {
    g.push_back(signed_gradient(params[i], grads[i], h.maximize, h.weight_decay, gate));
  }
  const StepScalar lr = gate.learning_rate(h.lr);
  Tensors directions;
  if (h.full_matrix) {
    directions = full_matrix_directions(h, params, g, state, blockings, batches, host_steps, gate);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor param = params[i];
    const StepScalar decayed_lr = decayed_learning_rate(h, state.steps[i], lr);
    if (h.full_matrix && directions[i].defined()) {
      subtract_scaled_(param, finite_entries(directions[i]), decayed_lr);
    } else if (!h.full_matrix) {
      diagonal_update(h, param, g[i], state.sums[i], decayed_lr, gate);
    }
  }
}

}  // namespace torchium::optim::detail
