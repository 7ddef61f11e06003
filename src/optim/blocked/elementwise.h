// The element-wise work of a step: moments before the matrix products, the update after them.
// Symbols as in shampoo_step.cpp and kfac_step.cpp.
#pragma once

#include "optim/core/found_inf_guard.h"

#include <ATen/core/Tensor.h>

namespace torchium::optim::detail {

struct GradientRule {
  bool maximize = false;
  double weight_decay = 0.0;  // L2, added to the gradient
  double beta1 = 0.0;         // 0: m = g
  double moment_beta = 1.0;   // of the grafted method; 1: a plain sum
  double grafting_eps = 0.0;
  double diagonal_beta = 1.0;
  double diagonal_eps = 0.0;
};

// One parameter. State that a rule does not need is undefined.
struct GradientElements {
  at::Tensor param;
  at::Tensor grad;
  at::Tensor exp_avg;
  at::Tensor moment;    // of the grafted method
  at::Tensor diagonal;  // of the diagonal rule
  StepScalar exp_avg_correction;
  StepScalar moment_correction;
  StepScalar diagonal_correction;
  // Results, in the state dtype. A tensor that is defined before the pass is written to. `g` may be
  // the gradient itself and `m` may be `g`: never write to a result.
  at::Tensor g;  // the gradient, negated for maximize, with L2 weight decay
  at::Tensor m;  // its bias-corrected moving average, or g
  at::Tensor f;  // direction of the grafted method: m / (sqrt(v / c) + grafting_eps)
  at::Tensor d;  // direction of the diagonal rule: m (a / c + eps)^(-1/2)
};

// Updates the state of one parameter and fills its results.
void gradient_pass(const GradientRule& rule, GradientElements& elements,
                   const FoundInfGuard& guard);

// target <- decay target + weight value, both of one dtype.
void scale_and_add_(at::Tensor& target, double decay, const at::Tensor& value, double weight);

struct UpdateRule {
  double decoupled_weight_decay = 0.0;
  double momentum = 0.0;
  bool nesterov = false;
  StepScalar direction_scale = {};  // multiplies d first
};

// p <- (1 - lr wd) p; buf <- momentum buf + d; p <- p - lr buf, or p - lr (d + momentum buf).
// Entries of d that are not finite count as zero; p and buf saturate at the largest number of their
// dtype. `momentum_buffer` is null without momentum.
void apply_update(const UpdateRule& rule, const StepScalar& lr, at::Tensor& param,
                  const at::Tensor& direction, at::Tensor* momentum_buffer,
                  const FoundInfGuard& guard);

// The whole step of a parameter that takes the direction of the grafted method: gradient_pass(),
// then apply_update() with f. On a CPU it is one pass without allocations.
void grafted_step(const GradientRule& gradient_rule, const UpdateRule& update_rule,
                  const StepScalar& lr, GradientElements& elements, at::Tensor* momentum_buffer,
                  const FoundInfGuard& guard);

}  // namespace torchium::optim::detail
