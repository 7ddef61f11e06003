// The factors of a layer as a part of the state of its weight (KFACParamState).
#pragma once

#include "torchium/optim/kfac.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace torchium::optim::detail {

// What the factors of a layer are stored as.
struct FactorLayout {
  int64_t groups = 1;
  bool has_bias_row = false;   // A has a row for a bias
  bool is_transposed = false;  // the weight is [in, out]
  bool diagonal_A = false;     // only the diagonal of a factor is kept
  bool diagonal_G = false;

  // The weight, or a tensor of its shape, as [out, ...].
  at::Tensor matrix(const at::Tensor& weight) const;
  // Orders of A and of G.
  int64_t order_A(const at::Tensor& weight) const;
  int64_t order_G(const at::Tensor& weight) const;
};

// The layout that factors may have: their shapes say the number of groups, whether there is a row
// for a bias and which are diagonals; also which dimension of a weight that is not square is the
// input.
FactorLayout layout_of_factors(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G);

// Whether the factors are those of a layer with this weight, as [out, in] or [in, out], with or
// without a bias.
bool factors_fit(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G);

// Whether a layer with factors has what `damping_split` makes of them.
bool has_roots(const KFACParamState& state, const std::string& damping_split);

// Creates the factors of a weight that has none: zeros, and the identity for what is made of them.
void add_factors(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const std::string& damping_split);

// Replaces what another damping_split has made of the factors by the identity; eigenvalues are -1
// until there are any.
void reset_roots(KFACParamState& state, const at::Tensor& weight, const FactorLayout& layout,
                 const std::string& damping_split);

// Gives `fresh` the factors of the layer that `saved` may be of, with what the damping_split that
// has made the inverses in `saved` makes of them: the option may have changed since. Without
// factors in `saved`, or for a parameter that cannot have any, none.
void add_saved_layout(KFACParamState& fresh, const at::Tensor& weight, const KFACParamState& saved,
                      const std::string& damping_split);

}  // namespace torchium::optim::detail
