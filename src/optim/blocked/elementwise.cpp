#include "optim/blocked/elementwise.h"

#include "optim/blocked/block_storage.h"
#include "optim/blocked/elementwise_cpu.h"
#include "optim/core/argument_checks.h"

#include <ATen/ATen.h>

#include <limits>

namespace torchium::optim::detail {
namespace {

// v <- b v + (1 - b) g^2; b = 1: a plain sum.
void update_second_moment(at::Tensor& moment, const at::Tensor& g, double beta,
                          const FoundInfGuard& guard) {
  if (beta == 1.0) {
    moment.addcmul_(g, g);  // g is zero where the step is skipped
  } else {
    guard.lerp_(moment, g * g, 1.0 - beta);
  }
}

// 1 / 0 becomes 0: without damping, entries whose gradients have all been zero do not move.
at::Tensor without_zeros(at::Tensor divisor, double damping) {
  return damping > 0.0
             ? divisor
             : divisor.masked_fill_(divisor.eq(0), std::numeric_limits<double>::infinity());
}

// target <- value, in memory set aside by the caller, if any.
void store(at::Tensor& target, const at::Tensor& value) {
  if (target.defined()) {
    target.copy_(value);
  } else {
    target = value;
  }
}

void gradient_pass_any(const GradientRule& rule, GradientElements& e, const FoundInfGuard& guard) {
  const at::Tensor g = signed_gradient(e.param, e.grad, rule.maximize, rule.weight_decay, guard);
  at::Tensor m = g;
  if (e.exp_avg.defined()) {
    guard.lerp_(e.exp_avg, g, 1.0 - rule.beta1);
    m = e.exp_avg_correction.divide(e.exp_avg);
  }
  store(e.g, g);
  if (e.exp_avg.defined()) {
    store(e.m, m);
  } else {
    e.m = e.g;
  }
  if (e.moment.defined()) {
    update_second_moment(e.moment, g, rule.moment_beta, guard);
    const at::Tensor root = e.moment_correction.divide(e.moment).sqrt().add_(rule.grafting_eps);
    store(e.f, m / without_zeros(root, rule.grafting_eps));
  }
  if (e.diagonal.defined()) {
    update_second_moment(e.diagonal, g, rule.diagonal_beta, guard);
    const at::Tensor damped = e.diagonal_correction.divide(e.diagonal).add(rule.diagonal_eps);
    store(e.d, m * without_zeros(damped, rule.diagonal_eps).rsqrt_());
  }
}

}  // namespace

void gradient_pass(const GradientRule& rule, GradientElements& e, const FoundInfGuard& guard) {
  const bool fuse = e.grad.scalar_type() == e.param.scalar_type() &&
                    can_fuse(e.param, {e.grad, e.exp_avg, e.moment, e.diagonal});
  if (!fuse) {
    gradient_pass_any(rule, e, guard);
    return;
  }
  const auto options = e.param.options().dtype(state_dtype(e.param));
  const auto set_aside = [&](at::Tensor& target) {
    if (!target.defined()) {
      target = at::empty(e.param.sizes(), options);
    }
  };
  const bool g_is_grad = !e.g.defined() && !rule.maximize && rule.weight_decay == 0.0 &&
                         e.grad.scalar_type() == options.dtype();
  if (!g_is_grad) {
    set_aside(e.g);
  }
  for (const auto& [state, result] :
       {std::pair(&e.exp_avg, &e.m), std::pair(&e.moment, &e.f), std::pair(&e.diagonal, &e.d)}) {
    if (state->defined()) {
      set_aside(*result);
    }
  }
  gradient_pass_cpu(rule, e);
  if (g_is_grad) {
    e.g = e.grad;
  }
  if (!e.m.defined()) {
    e.m = e.g;
  }
}

void scale_and_add_(at::Tensor& target, double decay, const at::Tensor& value, double weight) {
  if (can_fuse(target, {value})) {
    scale_and_add_cpu_(target, decay, value, weight);
  } else {
    target.mul_(decay).add_(value, weight);
  }
}

void apply_update(const UpdateRule& rule, const StepScalar& lr, at::Tensor& param,
                  const at::Tensor& direction, at::Tensor* momentum_buffer,
                  const FoundInfGuard& guard) {
  const at::Tensor buffer = momentum_buffer == nullptr ? at::Tensor() : *momentum_buffer;
  if (!lr.device.defined() && !rule.direction_scale.device.defined() &&
      can_fuse(param, {direction, buffer})) {
    apply_update_cpu(rule, lr.host, param, direction, momentum_buffer);
    return;
  }
  if (rule.decoupled_weight_decay != 0.0) {
    decay_(param, rule.decoupled_weight_decay, lr);
  }
  at::Tensor d = finite_entries(rule.direction_scale.multiply(direction));
  if (momentum_buffer != nullptr) {
    const double most = largest_number(momentum_buffer->scalar_type());
    guard.assign_(*momentum_buffer, (*momentum_buffer * rule.momentum + d).clamp_(-most, most));
    d = rule.nesterov ? d.add(*momentum_buffer, rule.momentum) : *momentum_buffer;
  }
  subtract_scaled_(param, d, lr);
}

void grafted_step(const GradientRule& gradient_rule, const UpdateRule& update_rule,
                  const StepScalar& lr, GradientElements& e, at::Tensor* momentum_buffer,
                  const FoundInfGuard& guard) {
  const at::Tensor buffer = momentum_buffer == nullptr ? at::Tensor() : *momentum_buffer;
  if (!lr.device.defined() && e.grad.scalar_type() == e.param.scalar_type() &&
      can_fuse(e.param, {e.grad, e.exp_avg, e.moment, buffer})) {
    grafted_step_cpu(gradient_rule, update_rule, lr.host, e, momentum_buffer);
    return;
  }
  gradient_pass(gradient_rule, e, guard);
  apply_update(update_rule, lr, e.param, e.f, momentum_buffer, guard);
}

}  // namespace torchium::optim::detail
