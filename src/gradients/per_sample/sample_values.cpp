#include "gradients/per_sample/sample_values.h"

#include "linalg/common/operand_checks.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace torchium::gradients::detail {

at::ScalarType widest_state_dtype(at::TensorList params) {
  const bool is_double = std::any_of(params.begin(), params.end(), [](const at::Tensor& param) {
    return linalg::detail::compute_dtype(param) == at::kDouble;
  });
  return is_double ? at::kDouble : at::kFloat;
}

std::vector<at::Tensor> as_state(at::TensorList params, at::TensorList vectors) {
  TORCH_CHECK_VALUE(params.size() == vectors.size(), "there are ", vectors.size(), " vectors for ",
                    params.size(), " parameters; pass one for each trainable parameter");
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_VALUE(vectors[i].sym_sizes() == params[i].sym_sizes(), "vectors[", i,
                      "] has shape ", vectors[i].sym_sizes(), " and its parameter ",
                      params[i].sym_sizes(), "; they must be the same");
    result.push_back(vectors[i].to(params[i].device(), linalg::detail::compute_dtype(params[i])));
  }
  return result;
}

std::vector<at::Tensor> as_state(at::TensorList params, const std::vector<std::string>& names,
                                 const torch::OrderedDict<std::string, at::Tensor>& vectors) {
  for (const auto& name : vectors.keys()) {
    TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), name) != names.end(),
                      "vectors has an entry '", name,
                      "', which is no trainable parameter of the model");
  }
  std::vector<at::Tensor> ordered;
  for (const auto i : c10::irange(names.size())) {
    const auto* vector = vectors.find(names[i]);
    TORCH_CHECK_VALUE(vector, "vectors has no entry '", names[i], "'; pass zeros to leave it out");
    TORCH_CHECK_VALUE(vector->defined() && vector->sizes() == params[i].sizes(), "vectors['",
                      names[i], "'] ",
                      vector->defined() ? c10::str("has shape ", vector->sizes()) : "is undefined",
                      "; it must be a tensor of shape ", params[i].sizes());
    ordered.push_back(vector->detach());
  }
  return as_state(params, ordered);
}

at::Tensor gram_of(const Jacobian& jacobian, size_t params) {
  return jacobian.gram(std::vector<double>(params, 1.0), GramSum::kFloat32);
}

at::Tensor clip_factors(const at::Tensor& norms, double max_norm) {
  return norms.reciprocal().mul_(max_norm).clamp_max_(1.0);
}

void check_max_norm(double max_norm) {
  TORCH_CHECK_VALUE(max_norm > 0, "max_norm is ", max_norm, "; it must be positive");
}

void check_workspace(int64_t max_workspace_bytes) {
  TORCH_CHECK_VALUE(max_workspace_bytes > 0, "max_workspace_bytes is ", max_workspace_bytes,
                    "; it must be positive");
}

}  // namespace torchium::gradients::detail
