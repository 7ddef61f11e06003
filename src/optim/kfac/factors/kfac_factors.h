// A layer's factors in the state of its weight (KFACParamState).
#pragma once

#include "linalg/products/structured_matrix.h"
#include "torchium/optim/kfac.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torchium::optim::detail {

using linalg::detail::Structure;

// The structures of new factors that are not of larger orders, or of an embedding.
struct FactorStructures {
  Structure A = Structure::kDense;
  Structure G = Structure::kDense;
  int64_t block = 0;
};
FactorStructures structures_of(const KFACOptions& options);

// How the factors of a layer are stored: A and G, or K and C of solver "inverse_free".
struct FactorLayout {
  int64_t groups = 1;
  bool has_bias_row = false;   // A has a row for a bias
  bool is_transposed = false;  // the weight is [in, out]
  FactorStructures structures = {};

  // The weight, or a tensor of its shape, as [out, ...].
  at::Tensor matrix(const at::Tensor& weight) const;
  // Orders of A and of G.
  int64_t order_A(const at::Tensor& weight) const;
  int64_t order_G(const at::Tensor& weight) const;
  // Their sizes.
  std::vector<int64_t> sizes_A(const at::Tensor& weight) const;
  std::vector<int64_t> sizes_G(const at::Tensor& weight) const;
};

// The layout of these factors. Their shapes determine the number of groups, whether there is a row
// for a bias, which factors are diagonals, and, unless the weight is square, which of its
// dimensions is the input.
FactorLayout layout_of_factors(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G);

// A or K, and G or C; undefined: the state has none.
const at::Tensor& factor_of_inputs(const KFACParamState& state);
const at::Tensor& factor_of_gradients(const KFACParamState& state);

// Whether the factors are those of a layer with this weight, as [out, in] or [in, out], with or
// without a bias.
bool factors_fit(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G);

// Whether a layer with factors has the inverses or eigensystems of `damping_split`.
bool has_roots(const KFACParamState& state, const std::string& damping_split);

// The dtype of the stored factors A and G of a weight.
at::ScalarType factor_dtype_of(const KFACOptions& options, const at::Tensor& weight);

bool is_inverse_free(const KFACOptions& options);

// Creates the factors of a weight: A and G as zeros, with reset_roots(), or K and C as identities,
// with update_momenta().
void add_factors(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const KFACOptions& options);

// Sets inverses or eigenvectors to the identity and removes those of another damping_split.
// Eigenvalues are -1 until the first solve.
void reset_roots(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const std::string& damping_split);

// Brings K, C and their momenta to factor_dtype. Creates missing momenta, as zeros, and removes
// those without an alpha1.
void update_momenta(KFACParamState& state, const at::Tensor& weight, const KFACOptions& options);

// Removes inverses, eigensystems and second moments.
void drop_roots(KFACParamState& state);

// Whether a weight has second moments, and eigenvectors and factors that fit it.
bool has_second_moments(const KFACParamState& state, const at::Tensor& weight);

// Creates the second moments of a layer with eigenvectors, from its eigenvalues.
void add_second_moments(KFACParamState& state);

// Creates the Fisher blocks of a norm's weight, as zeros.
void add_fisher_blocks(KFACParamState& state, const at::Tensor& weight, bool with_bias);

// Gives `fresh` factors of the layout in `saved`, with the inverses or eigensystems that are in
// `saved`, and with its second moments; if there are none, those of `damping_split`. Does nothing
// without factors in `saved`, or for a parameter that cannot have any.
void add_saved_layout(KFACParamState& fresh, const at::Tensor& weight, const KFACParamState& saved,
                      const KFACOptions& options);

}  // namespace torchium::optim::detail
