// Checks of parameters, gradients and state, whose messages name the tensor.
#pragma once

#include "optim/core/parameter_state.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torchium::optim::detail {

// "parameter 1 of group 0 (shape [3, 4])", or "parameter 'weight' ..." if it has a name in the
// model.
std::string parameter_name(size_t group, size_t position, const std::string& name,
                           const at::Tensor& param);

// Throws c10::ValueError for parameters that the optimizers do not support: sparse, complex,
// integer and expanded ones, and tensor subclasses.
void check_parameter(const at::Tensor& param, const std::string& name);

// Whether a step can use the gradient.
bool fits(const at::Tensor& grad, const at::Tensor& param);
// Throws c10::ValueError if it cannot. `name`: of the parameter.
void check_gradient(const at::Tensor& grad, const at::Tensor& param, const std::string& name);

// Throws c10::ValueError for NaN, Inf, a negative count or sum of squares, and a `step` that is no
// whole number. Waits for the device. `param`: its name.
void check_numbers(const at::Tensor& value, const std::string& key, const std::string& param);

// Optional keys of state.
struct OptionalKeys {
  std::vector<std::string> buffers;  // of the parameter's shape
  std::vector<std::string> counts;   // as `step`
};

// `fresh` state of a parameter with the values of `saved`, in the dtypes and on the device of
// `fresh`. Throws c10::ValueError for keys, shapes and kinds of dtype (floating-point or integer)
// that do not fit, for NaN and Inf, and for negative counts and sums of squares. Waits for the
// device.
NamedTensors loaded_state(const NamedTensors& fresh, const NamedTensors& saved,
                          const OptionalKeys& optional, const at::Tensor& param,
                          const std::string& name);

}  // namespace torchium::optim::detail
