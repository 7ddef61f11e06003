#include "optim/kfac/kfac_factors.h"

#include "optim/kfac/kfac_step.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {
namespace {

int64_t fan_in(const at::Tensor& matrix) {
  return matrix.size(0) == 0 ? 0 : matrix.numel() / matrix.size(0);
}

// Zero factors and what is made of them before the first inversion.
KfacLayer fresh_layer(const at::Tensor& weight, const FactorLayout& layout,
                      const std::string& damping_split) {
  return kfac_init_state(layout.matrix(weight), layout.has_bias_row, layout.groups,
                         parse_damping_split(damping_split), layout.diagonal_A, layout.diagonal_G);
}

void set_roots(KFACParamState& state, const KfacLayer& fresh, const std::string& damping_split) {
  state.root_failures(fresh.root_failures);
  state.A_inverse({}).G_inverse({});
  state.A_eigenvectors({}).G_eigenvectors({}).A_eigenvalues({}).G_eigenvalues({});
  if (damping_split == "exact") {
    state.A_eigenvectors(fresh.A_root).G_eigenvectors(fresh.G_root);
    state.A_eigenvalues(fresh.A_eigenvalues).G_eigenvalues(fresh.G_eigenvalues);
  } else {
    state.A_inverse(fresh.A_root).G_inverse(fresh.G_root);
  }
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

void add_factors(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const std::string& damping_split) {
  const KfacLayer fresh = fresh_layer(weight, layout, damping_split);
  state.A(fresh.A).G(fresh.G).factor_updates(fresh.factor_updates);
  set_roots(state, fresh, damping_split);
}

void reset_roots(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const std::string& damping_split) {
  set_roots(state, fresh_layer(weight, layout, damping_split), damping_split);
}

void add_saved_layout(KFACParamState& fresh, const at::Tensor& weight, const KFACParamState& saved,
                      const std::string& damping_split) {
  const at::Tensor& A = first_defined(saved.A(), saved.A_inverse(), saved.A_eigenvectors());
  const at::Tensor& G = first_defined(saved.G(), saved.G_inverse(), saved.G_eigenvectors());
  const bool has_factors = A.defined() || G.defined() || saved.factor_updates().defined() ||
                           saved.root_failures().defined();
  if (!has_factors || (weight.dim() != 2 && weight.dim() != 4) || weight.numel() == 0) {
    return;
  }
  const bool exact = saved.A_eigenvectors().defined();
  const bool other = saved.A_inverse().defined();
  add_factors(fresh, weight, layout_of_factors(weight, A, G),
              exact   ? "exact"
              : other ? "pi"
                      : damping_split);
}

}  // namespace torchium::optim::detail
