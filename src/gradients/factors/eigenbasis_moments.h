// Second moments of sample gradients in a Kronecker-factored eigenbasis (EKFAC: George et al. 2018,
// arXiv 1806.03884, section 3).
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// Eigenvectors in columns; a factor that is stored as its diagonal, [groups, n], has the identity.
struct Eigenbasis {
  at::Tensor A;  // [groups, a, a]
  at::Tensor G;  // [groups, o, o]

  bool defined() const { return A.defined(); }
};

// sum += sum over samples of (U_G^T D U_A)^2, element by element, with D [o, a] the gradient of the
// sample: sum over its positions of g a^T. sum: [groups, o, a], float32 or float64, where a has one
// column more than the fan-in for a bias. An embedding adds (h U_A)^2 in the row of each word that
// was looked up, with h the gradient of the row; U_G must then be the identity.
void add_eigenbasis_moments_(at::Tensor& sum, const LayerCall& call, at::IntArrayRef weight_shape,
                             const Eigenbasis& basis);

}  // namespace torchium::gradients::detail
