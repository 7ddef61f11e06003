// Checks of parameters, gradients and state, which name the tensor that does not fit.
#pragma once

#include "optim/core/parameter_state.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torchium::optim::detail {

// A parameter in messages: "parameter 1 of group 0 (shape [3, 4])". `name`: in the model; empty:
// its position instead.
std::string parameter_name(size_t group, size_t position, const std::string& name,
                           const at::Tensor& param);

// Throws c10::ValueError for parameters that the optimizers do not take: that are not dense, real
// and floating, tensor subclasses, and those whose elements share memory.
void check_parameter(const at::Tensor& param, const std::string& name);

// Whether a step can take the gradient.
bool fits(const at::Tensor& grad, const at::Tensor& param);
// Throws c10::ValueError if not. `name` is that of the parameter.
void check_gradient(const at::Tensor& grad, const at::Tensor& param, const std::string& name);

// Keys that state may have beside those that it must have.
struct OptionalKeys {
  std::vector<std::string> buffers;  // of the parameter's shape
  std::vector<std::string> counts;   // as `step`
};

// `fresh` state of a parameter with the values of `saved` copied in, in the dtypes and on the
// device there. Throws c10::ValueError for keys, shapes and kinds (floating point or integer) that
// do not fit, and for numbers that no run has: NaN and Inf, and negative counts and sums of
// squares. Waits for the device.
NamedTensors loaded_state(const NamedTensors& fresh, const NamedTensors& saved,
                          const OptionalKeys& optional, const at::Tensor& param,
                          const std::string& name);

// Parts of it, for tensors under one key.
void check_fits(const at::Tensor& value, const at::Tensor& needed, const std::string& key,
                const std::string& param);
void check_numbers(const at::Tensor& value, const std::string& key, const std::string& param);

}  // namespace torchium::optim::detail
