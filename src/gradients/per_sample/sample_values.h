// What operators and C++ functions derive from a Jacobian in the same way.
#pragma once

#include "gradients/jacobian/jacobian.h"

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torchium::gradients::detail {

// float64 if a parameter is, otherwise float32.
at::ScalarType widest_state_dtype(at::TensorList params);

// The vectors in the state dtypes of the parameters.
std::vector<at::Tensor> as_state(at::TensorList params, at::TensorList vectors);

// The same, by name. Raises ValueError unless there is one for each.
std::vector<at::Tensor> as_state(at::TensorList params, const std::vector<std::string>& names,
                                 const torch::OrderedDict<std::string, at::Tensor>& vectors);

// J J^T of as many parameters, exactly symmetric: [n, n] float64.
at::Tensor gram_of(const Jacobian& jacobian, size_t params);

// min(1, max_norm / norms). A norm that is not finite gives a factor that makes the sum NaN.
at::Tensor clip_factors(const at::Tensor& norms, double max_norm);

// Raise ValueError.
void check_max_norm(double max_norm);
void check_workspace(int64_t max_workspace_bytes);

}  // namespace torchium::gradients::detail
