#include "optim/kfac/factors/kfac_factors.h"

#include "optim/core/parameter_state.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {
namespace {

int64_t fan_in(const at::Tensor& matrix) {
  return matrix.size(0) == 0 ? 0 : matrix.numel() / matrix.size(0);
}

at::Tensor first_defined(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c = {}) {
  return a.defined() ? a : b.defined() ? b : c;
}

Structure structure_called(const std::string& name) {
  return name == "diagonal"         ? Structure::kDiagonal
         : name == "toeplitz"       ? Structure::kToeplitz
         : name == "block_diagonal" ? Structure::kBlockDiagonal
                                    : Structure::kDense;
}

}  // namespace

bool is_inverse_free(const KFACOptions& options) { return options.solver() == "inverse_free"; }

FactorStructures structures_of(const KFACOptions& options) {
  if (!is_inverse_free(options)) {
    return {};
  }
  const auto& [K, C] = options.structures();
  return {structure_called(K), structure_called(C), options.block_size()};
}

const at::Tensor& factor_of_inputs(const KFACParamState& state) {
  return state.A().defined() ? state.A() : state.K();
}

const at::Tensor& factor_of_gradients(const KFACParamState& state) {
  return state.G().defined() ? state.G() : state.C();
}

at::Tensor FactorLayout::matrix(const at::Tensor& weight) const {
  return is_transposed ? weight.detach().t() : weight;
}

int64_t FactorLayout::order_A(const at::Tensor& weight) const {
  return fan_in(matrix(weight)) + (has_bias_row ? 1 : 0);
}

int64_t FactorLayout::order_G(const at::Tensor& weight) const {
  return matrix(weight).size(0) / groups;
}

std::vector<int64_t> FactorLayout::sizes_A(const at::Tensor& weight) const {
  return linalg::detail::stored_sizes(groups, order_A(weight), structures.A, structures.block);
}

std::vector<int64_t> FactorLayout::sizes_G(const at::Tensor& weight) const {
  return linalg::detail::stored_sizes(groups, order_G(weight), structures.G, structures.block);
}

FactorLayout layout_of_factors(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G) {
  FactorLayout layout;
  const auto set_structure = [&](const at::Tensor& factor, Structure& structure) {
    if (factor.defined() && (factor.dim() == 2 || (factor.dim() == 3 && factor.size(2) > 0))) {
      structure = linalg::detail::structure_of(factor);
      if (structure == Structure::kBlockDiagonal) {
        layout.structures.block = factor.size(2);
      }
    }
  };
  set_structure(A, layout.structures.A);
  set_structure(G, layout.structures.G);
  layout.is_transposed = weight.dim() == 2 && G.defined() && G.dim() >= 2 &&
                         weight.size(0) != weight.size(1) && G.size(1) == weight.size(1);
  const at::Tensor matrix = layout.matrix(weight);
  if (A.defined() && A.dim() >= 2 && A.size(0) > 0 && matrix.size(0) % A.size(0) == 0) {
    layout.groups = A.size(0);
  }
  layout.has_bias_row = A.defined() && A.dim() >= 2 && A.size(1) == fan_in(matrix) + 1;
  return layout;
}

bool factors_fit(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G) {
  const auto fits = [&](const at::Tensor& matrix) {
    const int64_t rows_of_bias = A.size(1) - fan_in(matrix);
    return (rows_of_bias == 0 || rows_of_bias == 1) && A.size(0) * G.size(1) == matrix.size(0);
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
  state.factor_updates(at::zeros({}, of_factors.dtype(at::kFloat)));
  at::Tensor of_inputs = at::zeros(layout.sizes_A(weight), of_factors);
  at::Tensor of_gradients = at::zeros(layout.sizes_G(weight), of_factors);
  if (is_inverse_free(options)) {
    linalg::detail::add_to_diagonal_(of_inputs, 1.0);
    linalg::detail::add_to_diagonal_(of_gradients, 1.0);
    state.K(of_inputs).C(of_gradients);
    state.root_failures(at::zeros({2}, of_factors.dtype(at::kInt)));
    update_momenta(state, weight, options);
  } else {
    state.A(of_inputs).G(of_gradients);
    reset_roots(state, weight, layout, options.damping_split());
  }
}

void update_momenta(KFACParamState& state, const at::Tensor& weight, const KFACOptions& options) {
  const at::ScalarType dtype = factor_dtype_of(options, weight);
  state.K(state.K().to(dtype)).C(state.C().to(dtype));
  const auto update = [&](at::Tensor& momentum, const at::Tensor& factor) {
    momentum = options.alpha1() == 0.0 ? at::Tensor()
               : momentum.defined()    ? momentum.to(dtype)
                                       : at::zeros_like(factor);
  };
  update(state.m_K(), state.K());
  update(state.m_C(), state.C());
}

void reset_roots(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const std::string& damping_split) {
  const int64_t groups = layout.groups;
  const int64_t a = layout.order_A(weight);
  const int64_t o = layout.order_G(weight);
  const auto options = at::TensorOptions(state_dtype(weight)).device(weight.device());
  const auto identity = [&](int64_t n, Structure structure) {
    return structure == Structure::kDiagonal ? at::ones({groups, n}, options)
                                             : identities(groups, n, options);
  };
  const at::Tensor A_root = identity(a, layout.structures.A);
  const at::Tensor G_root = identity(o, layout.structures.G);
  state.root_failures(at::zeros({2}, options.dtype(at::kInt)));
  drop_roots(state);
  if (damping_split == "exact") {
    state.A_eigenvectors(A_root).G_eigenvectors(G_root);
    state.A_eigenvalues(at::full({groups, a}, -1.0, options));
    state.G_eigenvalues(at::full({groups, o}, -1.0, options));
  } else {
    state.A_inverse(A_root).G_inverse(G_root);
  }
}

void drop_roots(KFACParamState& state) {
  state.A_inverse({}).G_inverse({});
  state.A_eigenvectors({}).G_eigenvectors({}).A_eigenvalues({}).G_eigenvalues({});
  state.second_moments({}).moment_updates({});
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
  const bool is_of_roots =
      saved.K().defined() || saved.C().defined() || saved.m_K().defined() || saved.m_C().defined();
  const at::Tensor A = is_of_roots
                           ? first_defined(saved.K(), saved.m_K())
                           : first_defined(saved.A(), saved.A_inverse(), saved.A_eigenvectors());
  const at::Tensor G = is_of_roots
                           ? first_defined(saved.C(), saved.m_C())
                           : first_defined(saved.G(), saved.G_inverse(), saved.G_eigenvectors());
  const bool has_factors = A.defined() || G.defined() || saved.factor_updates().defined() ||
                           saved.root_failures().defined();
  if (!has_factors || weight.dim() < 2 || weight.dim() > 5 || weight.numel() == 0) {
    return;
  }
  const bool exact = saved.A_eigenvectors().defined();
  KFACOptions of_saved = options;
  of_saved.solver(is_of_roots ? "inverse_free" : "auto");
  if (is_of_roots) {
    of_saved.alpha1(saved.m_K().defined() || saved.m_C().defined() ? 0.5 : 0.0);
  } else if (exact || saved.A_inverse().defined()) {
    of_saved.damping_split(exact ? "exact" : "pi");
  }
  add_factors(fresh, weight, layout_of_factors(weight, A, G), of_saved);
  if (exact && (saved.second_moments().defined() || saved.moment_updates().defined())) {
    add_second_moments(fresh);
  }
}

}  // namespace torchium::optim::detail
