// What every step does first: check its arguments and bring the gradients into working form.
#pragma once

#include "optim/core/found_inf_guard.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// Raises ValueError, before anything changes, unless all parameters are dense, real and floating on
// one device, and there is one step count a parameter.
void check_parameters(at::TensorList params, const std::vector<at::Tensor>& steps,
                      const at::Tensor& status);

// The same for gradients, each of which must fit its parameter.
void check_gradients(at::TensorList params, at::TensorList grads);

// Both of these.
void check_step_arguments(at::TensorList params, at::TensorList grads,
                          const std::vector<at::Tensor>& steps, const at::Tensor& status);

// Checks a state tensor, which has the shape of its parameter and the state dtype. name, index: for
// the message.
void check_state_tensor(const at::Tensor& state, const at::Tensor& param, const char* name,
                        size_t index);
// The same for one tensor a parameter if `needed`, else empty or unused.
void check_state_list(const std::vector<at::Tensor>& state, at::TensorList params, bool needed,
                      const char* name);

// g: the gradient in the state's dtype, negated for `maximize`, plus weight_decay * parameter; zero
// where the step is skipped. The gradient itself where it needs no change: never write to the
// result.
at::Tensor signed_gradient(const at::Tensor& param, const at::Tensor& grad, bool maximize,
                           double weight_decay, const FoundInfGuard& guard);

// t of a parameter, as the host knows it: that of host_steps plus 1, or `step`, on the CPU, if
// host_steps is empty.
int64_t step_on_host(const at::Tensor& step, at::IntArrayRef host_steps, size_t param);

}  // namespace torchium::optim::detail
