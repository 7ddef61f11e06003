#include "optim/blocked/block_storage.h"
#include "optim/core/options.h"
#include "optim/kfac/kfac_step.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {

DampingSplit parse_damping_split(const std::string& name) {
  TORCH_CHECK_VALUE(kDampingSplits.accepts(name), "damping_split must be ",
                    kDampingSplits.requirement(), ", got '", name, "'");
  return name == "pi"      ? DampingSplit::kPi
         : name == "plain" ? DampingSplit::kPlain
                           : DampingSplit::kExact;
}

KfacLayer kfac_init_state(const at::Tensor& weight, bool has_bias, int64_t groups,
                          DampingSplit damping_split, bool diagonal_A, bool diagonal_G) {
  TORCH_CHECK_VALUE(weight.dim() >= 2,
                    "weight must be a matrix or a convolution kernel, got shape ", weight.sizes());
  TORCH_CHECK_VALUE(groups >= 1, "groups must be at least 1, got ", groups);
  TORCH_CHECK_VALUE(weight.size(0) % groups == 0, "groups must divide the ", weight.size(0),
                    " output channels of weight, got ", groups);
  const int64_t o = weight.size(0) / groups;
  const int64_t a = c10::multiply_integers(weight.sizes().slice(1)) + (has_bias ? 1 : 0);
  const auto options = at::TensorOptions().dtype(state_dtype(weight)).device(weight.device());
  const auto zeros = [&](int64_t n, bool diagonal) {
    return diagonal ? at::zeros({groups, n}, options) : at::zeros({groups, n, n}, options);
  };
  // Memory of its own for every group: expanded identities must not be written to.
  const auto identities = [&](int64_t n, bool diagonal) {
    return diagonal ? at::ones({groups, n}, options)
                    : at::eye(n, options).expand({groups, n, n}).contiguous();
  };
  KfacLayer layer;
  layer.A = zeros(a, diagonal_A);
  layer.G = zeros(o, diagonal_G);
  layer.A_root = identities(a, diagonal_A);
  layer.G_root = identities(o, diagonal_G);
  const bool exact = damping_split == DampingSplit::kExact;
  layer.A_eigenvalues = exact ? at::full({groups, a}, -1.0, options) : at::empty({0}, options);
  layer.G_eigenvalues = exact ? at::full({groups, o}, -1.0, options) : at::empty({0}, options);
  layer.factor_updates = at::zeros({}, options.dtype(at::kFloat));
  layer.root_failures = at::zeros({2}, options.dtype(at::kInt));
  return layer;
}

}  // namespace torchium::optim::detail
