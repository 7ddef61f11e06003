// The two factors of K-FAC (Martens and Grosse 2015, arXiv 1503.05671; convolutions: Grosse and
// Martens 2016, arXiv 1602.01407), as sums over the captured calls of a layer.
#pragma once

#include "gradients/layer_use.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// A_sum += sum of a a^T and G_sum += sum of g g^T over samples and positions, a the input of a
// linear layer or the patch of a convolution, g the output gradient.
// A_sum: [groups, a, a], where a is the fan-in of a group, or one more: then each input vector gets
// a 1 at its end, for the bias. G_sum: [groups, o, o], o output channels of a group. Both float32
// or float64, contiguous, symmetric, and exactly symmetric afterwards. A sum without its last
// dimension holds the diagonal alone. ValueError on other shapes, with nothing changed. Only kind,
// settings and tensors of the use are read.
// accumulate = false: the sums are overwritten, and need not be initialised.
void update_kronecker_factors_(at::Tensor& A_sum, at::Tensor& G_sum, const LayerUse& use,
                               at::IntArrayRef weight_shape, bool accumulate = true);

// The checks of the above alone. Usable on tensors with symbolic sizes.
void check_kronecker_factors(const at::Tensor& A_sum, const at::Tensor& G_sum, const LayerUse& use,
                             at::IntArrayRef weight_shape);

}  // namespace torchium::gradients::detail
