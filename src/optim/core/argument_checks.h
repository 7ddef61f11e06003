// Checks of the arguments of a step, and gradients in the form that a step works with.
#pragma once

#include "optim/core/found_inf_guard.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// Raises ValueError unless all parameters are on one device, with one step count per parameter.
void check_parameters(at::TensorList params, const std::vector<at::Tensor>& steps,
                      const at::Tensor& status);

// The gradient in the state dtype, negated for `maximize`, plus weight_decay * parameter; zero if
// the step is skipped. May be the gradient itself: never write to the result.
at::Tensor signed_gradient(const at::Tensor& param, const at::Tensor& grad, bool maximize,
                           double weight_decay, const FoundInfGuard& guard);

// t of a parameter: host_steps[param] + 1, or `step`, on the CPU, if host_steps is empty.
int64_t step_on_host(const at::Tensor& step, at::IntArrayRef host_steps, size_t param);

}  // namespace torchium::optim::detail
