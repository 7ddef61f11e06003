#include "optim/kfac/kfac_factors.h"

#include "optim/core/parameter_state.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {
namespace {

int64_t fan_in(const at::Tensor& matrix) {
  return matrix.size(0) == 0 ? 0 : matrix.numel() / matrix.size(0);
}

const at::Tensor& first_defined(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return a.defined() ? a : b.defined() ? b : c;
}

}  // namespace

at::Tensor FactorLayout::matrix(const at::Tensor& weight) const {
  return is_transposed ? weight.detach().t() : weight;
}

int64_t FactorLayout::order_A(const at::Tensor& weight) const {
  return fan_in(matrix(weight)) + (has_bias_row ? 1 : 0);
}

int64_t FactorLayout::order_G(const at::Tensor& weight) const {
  return matrix(weight).size(0) / groups;
}

FactorLayout layout_of_factors(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G) {
  FactorLayout layout;
  layout.diagonal_A = A.defined() && A.dim() == 2;
  layout.diagonal_G = G.defined() && G.dim() == 2;
  layout.is_transposed = weight.dim() == 2 && G.defined() && G.dim() >= 2 &&
                         weight.size(0) != weight.size(1) && G.size(-1) == weight.size(1);
  const at::Tensor matrix = layout.matrix(weight);
  if (A.defined() && A.dim() >= 2 && A.size(0) > 0 && matrix.size(0) % A.size(0) == 0) {
    layout.groups = A.size(0);
  }
  layout.has_bias_row = A.defined() && A.dim() >= 2 && A.size(-1) == fan_in(matrix) + 1;
  return layout;
}

bool factors_fit(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G) {
  const auto fits = [&](const at::Tensor& matrix) {
    const int64_t rows_of_bias = A.size(-1) - fan_in(matrix);
    return (rows_of_bias == 0 || rows_of_bias == 1) && A.size(0) * G.size(-1) == matrix.size(0);
  };
  return weight.dim() >= 2 && (fits(weight) || (weight.dim() == 2 && fits(weight.mT())));
}

bool has_roots(const KFACParamState& state, const std::string& damping_split) {
  return damping_split == "exact"
             ? state.A_eigenvectors().defined() && state.G_eigenvectors().defined() &&
                   state.A_eigenvalues().defined() && state.G_eigenvalues().defined()
             : state.A_inverse().defined() && state.G_inverse().defined();
}

at::ScalarType factor_dtype_of(const KFACOptions& options, const at::Tensor& weight) {
  const auto& name = options.factor_dtype();
  return !name                 ? state_dtype(weight)
         : *name == "bfloat16" ? at::kBFloat16
         : *name == "float32"  ? at::kFloat
                               : at::kDouble;
}

void add_factors(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const KFACOptions& options) {
  const auto of_factors =
      at::TensorOptions(factor_dtype_of(options, weight)).device(weight.device());
  const auto zeros = [&](int64_t n, bool diagonal) {
    return diagonal ? at::zeros({layout.groups, n}, of_factors)
                    : at::zeros({layout.groups, n, n}, of_factors);
  };
  state.A(zeros(layout.order_A(weight), layout.diagonal_A));
  state.G(zeros(layout.order_G(weight), layout.diagonal_G));
  state.factor_updates(at::zeros({}, of_factors.dtype(at::kFloat)));
  reset_roots(state, weight, layout, options.damping_split());
}

void reset_roots(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const std::string& damping_split) {
  const int64_t groups = layout.groups;
  const int64_t a = layout.order_A(weight);
  const int64_t o = layout.order_G(weight);
  const auto options = at::TensorOptions(state_dtype(weight)).device(weight.device());
  // Each group has its own memory, because expanded identities must not be written to.
  const auto identities = [&](int64_t n, bool diagonal) {
    return diagonal ? at::ones({groups, n}, options)
                    : at::eye(n, options).expand({groups, n, n}).contiguous();
  };
  const at::Tensor A_root = identities(a, layout.diagonal_A);
  const at::Tensor G_root = identities(o, layout.diagonal_G);
  state.root_failures(at::zeros({2}, options.dtype(at::kInt)));
  state.A_inverse({}).G_inverse({});
  state.A_eigenvectors({}).G_eigenvectors({}).A_eigenvalues({}).G_eigenvalues({});
  state.second_moments({}).moment_updates({});
  if (damping_split == "exact") {
    state.A_eigenvectors(A_root).G_eigenvectors(G_root);
    state.A_eigenvalues(at::full({groups, a}, -1.0, options));
    state.G_eigenvalues(at::full({groups, o}, -1.0, options));
  } else {
    state.A_inverse(A_root).G_inverse(G_root);
  }
}

bool has_second_moments(const KFACParamState& state, const at::Tensor& weight) {
  const auto is_like = [](const at::Tensor& vectors, const at::Tensor& factor) {
    return vectors.defined() && factor.defined() && vectors.sizes() == factor.sizes();
  };
  return state.second_moments().defined() && is_like(state.A_eigenvectors(), state.A()) &&
         is_like(state.G_eigenvectors(), state.G()) && factors_fit(weight, state.A(), state.G());
}

void add_second_moments(KFACParamState& state) {
  // Before the first solve both are -1.
  state.second_moments(state.G_eigenvalues().unsqueeze(-1) * state.A_eigenvalues().unsqueeze(-2));
  state.moment_updates(at::zeros_like(state.factor_updates()));
}

void add_fisher_blocks(KFACParamState& state, const at::Tensor& weight, bool with_bias) {
  const auto options = at::TensorOptions(state_dtype(weight)).device(weight.device());
  const int64_t k = with_bias ? 2 : 1;
  state.fisher_blocks(at::zeros({weight.numel(), k, k}, options));
  state.factor_updates(at::zeros({}, options.dtype(at::kFloat)));
}

void add_saved_layout(KFACParamState& fresh, const at::Tensor& weight, const KFACParamState& saved,
                      const KFACOptions& options) {
  if (saved.fisher_blocks().defined()) {
    const at::Tensor& blocks = saved.fisher_blocks();
    add_fisher_blocks(fresh, weight, /*with_bias=*/blocks.dim() > 0 && blocks.size(-1) > 1);
    return;
  }
  const at::Tensor& A = first_defined(saved.A(), saved.A_inverse(), saved.A_eigenvectors());
  const at::Tensor& G = first_defined(saved.G(), saved.G_inverse(), saved.G_eigenvectors());
  const bool has_factors = A.defined() || G.defined() || saved.factor_updates().defined() ||
                           saved.root_failures().defined();
  if (!has_factors || weight.dim() < 2 || weight.dim() > 5 || weight.numel() == 0) {
    return;
  }
  const bool exact = saved.A_eigenvectors().defined();
  KFACOptions of_saved = options;
  if (exact || saved.A_inverse().defined()) {
    of_saved.damping_split(exact ? "exact" : "pi");
  }
  add_factors(fresh, weight, layout_of_factors(weight, A, G), of_saved);
  if (exact && (saved.second_moments().defined() || saved.moment_updates().defined())) {
    add_second_moments(fresh);
  }
}

}  // namespace torchium::optim::detail
