// The element-wise work of a step on the CPU, fused: one pass before the matrix products and one
// after them. elementwise.cpp does the same for any tensor, with one operator per operation.
#pragma once

#include "optim/blocked/elementwise.h"

namespace torchium::optim::detail {

// Whether the fused loops take this parameter (float32, float64, bfloat16 or float16) and its other
// tensors: all contiguous and on the CPU. Undefined tensors are ignored.
bool can_fuse(const at::Tensor& param, at::TensorList others);

// Writes g, m, f and d of `elements` into its result tensors (undefined: not needed). The gradient
// has the dtype of the parameter.
void gradient_pass_cpu(const GradientRule& rule, const GradientElements& elements);

// See scale_and_add_; float32 or float64.
void scale_and_add_cpu_(at::Tensor& target, double decay, const at::Tensor& value, double weight);

// See apply_update.
void apply_update_cpu(const UpdateRule& rule, double lr, at::Tensor& param,
                      const at::Tensor& direction, at::Tensor* momentum_buffer);

// See grafted_step.
void grafted_step_cpu(const GradientRule& gradient_rule, const UpdateRule& update_rule, double lr,
                      GradientElements& elements, at::Tensor* momentum_buffer);

}  // namespace torchium::optim::detail
