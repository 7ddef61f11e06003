#include "optim/shampoo_step.h"

#include "optim/blocking.h"
#include "optim/preconditioner.h"
#include "optim/step_gate.h"
#include "optim/step_inputs.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

bool uses_second_moment(const ShampooHyperparameters& h) {
  return h.grafting.has_value() && *h.grafting != "sgd";
}

// The blocks of each parameter; none for those with the diagonal rule.
std::vector<Blocking> make_blockings(at::TensorList params, int64_t block_size, bool merge_dims,
                                     bool diagonal_1d) {
  std::vector<Blocking> blockings;
  blockings.reserve(params.size());
  for (const auto& param : params) {
    auto dims = merged_dims(param.sizes(), block_size, merge_dims);
    blockings.push_back(diagonal_1d && dims.size() == 1
                            ? Blocking{std::move(dims), {}}
                            : make_blocking(std::move(dims), block_size));
  }
  return blockings;
}

std::vector<Blocking> make_blockings(at::TensorList params, const ShampooHyperparameters& h) {
  return make_blockings(params, h.block_size, h.merge_dims, h.preconditioner_1d == "diagonal");
}

// 1 - beta^t of each parameter; 1 for a plain sum (beta = 1).
std::vector<StepScalar> bias_corrections(const Tensors& steps, double beta) {
  std::vector<StepScalar> corrections(steps.size());
  if (beta == 1.0) {
    return corrections;
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].is_cpu()) {
      corrections[i].host = 1.0 - std::pow(beta, steps[i].item<float>());
    } else {
      // A first step that was skipped has t = 0: c = 0 would make 0 / 0.
      corrections[i].device = 1.0 - at::pow(beta, steps[i].to(at::kDouble).clamp_min(1.0));
    }
  }
  return corrections;
}

// m: g, or its bias-corrected moving average (beta1 > 0).
Tensors averaged_gradients(const ShampooHyperparameters& h, const Tensors& gradients,
                           ShampooState& state, const StepGate& gate) {
  if (h.beta1 == 0.0) {
    return gradients;
  }
  const auto corrections = bias_corrections(state.steps, h.beta1);
  Tensors averages;
  averages.reserve(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    gate.lerp_(state.exp_avgs[i], gradients[i], 1.0 - h.beta1);
    averages.push_back(corrections[i].divide(state.exp_avgs[i]));
  }
  return averages;
}

// v <- b v + (1 - b) g^2; b = 1: a plain sum.
void update_second_moment(at::Tensor& moment, const at::Tensor& g, double beta,
                          const StepGate& gate) {
  if (beta == 1.0) {
    moment.addcmul_(g, g);
  } else if (gate.keep().defined()) {
    gate.lerp_(moment, g * g, 1.0 - beta);
  } else {
    moment.mul_(beta).addcmul_(g, g, 1.0 - beta);
  }
}

// Directions of the grafted method: m, or m / (sqrt(v / c) + grafting_eps).
Tensors grafting_directions(const ShampooHyperparameters& h, const Tensors& gradients,
                            const Tensors& averages, ShampooState& state, const StepGate& gate) {
  if (!uses_second_moment(h)) {
    return averages;
  }
  const double beta = *h.grafting == "adagrad" ? 1.0 : h.grafting_beta2;
  const auto corrections = bias_corrections(state.steps, *h.grafting == "adam" ? beta : 1.0);
  Tensors directions;
  directions.reserve(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor& moment = state.grafting_second_moments[i];
    update_second_moment(moment, gradients[i], beta, gate);
    directions.push_back(averages[i] / corrections[i].divide(moment).sqrt().add_(h.grafting_eps));
  }
  return directions;
}

// d <- |f| / |d| d for each block of a stack [count, sizes...].
at::Tensor graft(const at::Tensor& directions, const at::Tensor& grafted) {
  const at::Tensor norms = directions.flatten(1).norm(2, {1});
  const at::Tensor scale = grafted.flatten(1).norm(2, {1}) / norms;
  std::vector<int64_t> sizes(directions.dim(), 1);
  sizes[0] = -1;
  return directions * at::where(norms.gt(0), scale, at::zeros_like(scale)).view(sizes);
}

// The same for a parameter with the diagonal rule, cut into blocks of block_size.
at::Tensor graft_diagonal(const at::Tensor& direction, const at::Tensor& grafted,
                          int64_t block_size) {
  Tensors parts;
  const auto directions = direction.reshape({1, -1}).split(block_size, 1);
  const auto grafted_parts = grafted.reshape({1, -1}).split(block_size, 1);
  for (size_t i = 0; i < directions.size(); ++i) {
    parts.push_back(graft(directions[i], grafted_parts[i]));
  }
  return at::cat(parts, 1).view(direction.sizes());
}

// Order 0 and 1: a <- b2 a + (1 - b2) g^2, direction m (a / c + eps)^(-1/2), at every step.
void diagonal_directions(const ShampooHyperparameters& h, const std::vector<Blocking>& blockings,
                         const Tensors& g, const Tensors& m, const Tensors& f, ShampooState& state,
                         const std::vector<StepScalar>& corrections, const StepGate& gate,
                         Tensors& d) {
  for (size_t i = 0, next = 0; i < blockings.size(); ++i) {
    if (!blockings[i].shapes.empty()) {
      continue;
    }
    at::Tensor& diagonal = state.diagonals[next++];
    update_second_moment(diagonal, g[i], h.beta2, gate);
    d[i] = m[i] * corrections[i].divide(diagonal).add(h.eps).rsqrt_();
    if (h.grafting.has_value()) {
      d[i] = graft_diagonal(d[i], f[i], h.block_size);
    }
  }
}

// buf <- momentum buf + d; d becomes buf, or d + momentum buf (Nesterov).
at::Tensor apply_momentum(const ShampooHyperparameters& h, const at::Tensor& direction,
                          at::Tensor& buffer, const StepGate& gate) {
  if (gate.keep().defined()) {
    gate.assign_(buffer, buffer * h.momentum + direction);
  } else {
    buffer.mul_(h.momentum).add_(direction);
  }
  return h.nesterov ? direction.add(buffer, h.momentum) : buffer;
}

RootRule root_rule(const ShampooHyperparameters& h, const MatrixBatch& batch) {
  const auto order = static_cast<double>(batch.sizes.size());  // k
  return {h.eps, h.relative_eps, h.exponent.value_or(-1.0 / (2.0 * order)), h.root_method};
}

// What the host decides about each parameter.
struct Schedule {
  std::vector<bool> root_due;
  std::vector<bool> started;  // false: still the first steps, which use the grafted direction
  bool any_root_due = false;
};

Schedule make_schedule(const ShampooHyperparameters& h, const Tensors& steps,
                       at::IntArrayRef host_steps) {
  Schedule schedule;
  const bool host_knows = !h.capturable || steps[0].is_cpu();
  const auto t = host_knows ? steps_on_host(steps, host_steps) : std::vector<int64_t>();
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool due =
        !h.capturable && root_is_due(t[i], h.start_preconditioning_step, h.update_freq);
    schedule.root_due.push_back(due);
    schedule.started.push_back(!host_knows || t[i] >= h.start_preconditioning_step);
    schedule.any_root_due |= due;
  }
  return schedule;
}

// Before start_preconditioning_step the direction is the grafted one (m without grafting).
void use_grafting_at_first(const ShampooHyperparameters& h, const Schedule& schedule,
                           const Tensors& steps, const Tensors& f, Tensors& d) {
  for (size_t i = 0; i < d.size(); ++i) {
    if (!schedule.started[i]) {
      d[i] = f[i];
    } else if (h.capturable && h.start_preconditioning_step > 1) {
      d[i] = at::where(steps[i].ge(h.start_preconditioning_step), d[i], f[i]);
    }
  }
}

void apply_updates(const ShampooHyperparameters& h, at::TensorList params,
                   const Tensors& directions, ShampooState& state, const StepGate& gate) {
  const StepScalar lr = gate.learning_rate(h.lr);
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor param = params[i];
    if (h.decoupled_weight_decay && h.weight_decay != 0.0) {
      decay_(param, h.weight_decay, lr);  // p <- (1 - lr wd) p
    }
    const at::Tensor d = h.momentum > 0.0
                             ? apply_momentum(h, directions[i], state.momentum_buffers[i], gate)
                             : directions[i];
    subtract_scaled_(param, d, lr);  // p <- p - lr d
  }
}

void check_state(const ShampooHyperparameters& h, at::TensorList params, at::TensorList grads,
                 const ShampooState& state, const std::vector<Blocking>& blockings,
                 at::IntArrayRef host_steps) {
  check_step_arguments(params, grads, state.steps, state.status, host_steps, !h.capturable);
  check_state_list(state.exp_avgs, params, h.beta1 > 0.0, "exp_avgs");
  check_state_list(state.grafting_second_moments, params, uses_second_moment(h),
                   "grafting_second_moments");
  check_state_list(state.momentum_buffers, params, h.momentum > 0.0, "momentum_buffers");
  Tensors with_diagonal;
  for (size_t i = 0; i < params.size(); ++i) {
    if (blockings[i].shapes.empty()) {
      with_diagonal.push_back(params[i]);
    }
  }
  check_state_list(state.diagonals, with_diagonal, true, "diagonals");
}

}  // namespace

bool has_diagonal_preconditioner(at::IntArrayRef shape, int64_t block_size, bool merge_dims,
                                 const std::string& preconditioner_1d) {
  return preconditioner_1d == "diagonal" && merged_dims(shape, block_size, merge_dims).size() == 1;
}

MatrixStacks shampoo_init_state(at::TensorList params, int64_t block_size, bool merge_dims,
                                const std::string& preconditioner_1d) {
  c10::NoGradGuard no_grad;
  return make_stacks(
      params, make_blockings(params, block_size, merge_dims, preconditioner_1d == "diagonal"));
}

void shampoo_step(const ShampooHyperparameters& h, at::TensorList params, at::TensorList grads,
                  ShampooState& state, at::IntArrayRef host_steps) {
  c10::NoGradGuard no_grad;
  if (params.empty()) {
    return;
  }
  const auto blockings = make_blockings(params, h);
  check_state(h, params, grads, state, blockings, host_steps);
  auto batches = find_batches(blockings, {state.statistics, state.roots, state.root_failures});

  const StepGate gate = StepGate::check(grads, state.status);
  if (gate.skipped_on_host()) {
    return;
  }
  gate.advance(state.steps);  // t <- t + 1
  const Schedule schedule = make_schedule(h, state.steps, host_steps);
  const auto corrections = bias_corrections(state.steps, h.beta2);  // c = 1 - b2^t

  const double l2 = h.decoupled_weight_decay ? 0.0 : h.weight_decay;
  const Tensors g = signed_gradients(params, grads, h.maximize, l2, gate);  // g + wd p
  const Tensors m = averaged_gradients(h, g, state, gate);                  // EMA of g, or g
  const Tensors f = grafting_directions(h, g, m, state, gate);  // m / (sqrt(v) + eps), or m
  Tensors d(params.size());

  for (auto& batch : batches) {
    const at::Tensor blocks = pack(batch, blockings, g);
    update_statistics(batch, blocks, h.beta2, gate);  // L_i <- b2 L_i + (1-b2) mat_i(g) mat_i(g)^T
    if (schedule.any_root_due) {                      // R_i <- (L_i / c + eps I)^(-1/(2k))
      update_roots(batch, root_rule(h, batch), schedule.root_due, corrections, gate);
    }
    const at::Tensor averages = h.beta1 == 0.0 ? blocks : pack(batch, blockings, m);
    at::Tensor directions = precondition(batch, averages);  // m x_1 R_1 ... x_k R_k
    if (h.grafting.has_value()) {                           // |f| / |d| d
      directions = graft(directions, uses_second_moment(h) ? pack(batch, blockings, f) : averages);
    }
    unpack(batch, blockings, directions, params, d);
  }
  diagonal_directions(h, blockings, g, m, f, state, corrections, gate, d);
  if (schedule.any_root_due) {
    record_root_failures(batches, state.status);
  }
  use_grafting_at_first(h, schedule, state.steps, f, d);
  apply_updates(h, params, d, state, gate);  // weight decay, momentum, p <- p - lr d
}

void shampoo_update_preconditioners(const ShampooHyperparameters& h, at::TensorList params,
                                    ShampooState& state) {
  c10::NoGradGuard no_grad;
  if (params.empty()) {
    return;
  }
  const auto blockings = make_blockings(params, h);
  auto batches = find_batches(blockings, {state.statistics, state.roots, state.root_failures});
  const auto corrections = bias_corrections(state.steps, h.beta2);
  const std::vector<bool> all(params.size(), true);
  for (auto& batch : batches) {
    update_roots(batch, root_rule(h, batch), all, corrections, StepGate::open());
  }
  record_root_failures(batches, state.status);
}

}  // namespace torchium::optim::detail
