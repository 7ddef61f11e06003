// The two factors of K-FAC (Martens and Grosse 2015, arXiv 1503.05671; convolutions: Grosse and
// Martens 2016, arXiv 1602.01407), as sums over the captured calls of a layer.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// A_sum += sum of a a^T and G_sum += sum of g g^T over samples and positions, a the input of a
// linear layer or the patch of a convolution, g the output gradient.
// A_sum: [groups, a, a], where a is the fan-in of a group, or one more: then each input vector gets
// a 1 at its end, for the bias. G_sum: [groups, o, o], o output channels of a group. Both float32
// or float64, contiguous, symmetric, and exactly symmetric afterwards. Without its last dimension a
// sum is the diagonal alone. ValueError on other shapes, with nothing changed. Only kind, settings
// and tensors of the call count.
// An embedding with a weight [words, width] swaps the two: its inputs are one-hot, so that
// G_sum [1, words] += how often each word was looked up, a diagonal always, and A_sum [1, width,
// width] or [1, width] += sum of h h^T with h the gradient of what the lookup returned. Lookups of
// padding_idx have no gradient and count in neither. Indices are in range.
// accumulate = false: what the sums hold before is overwritten, and need not be set.
void update_kronecker_factors_(at::Tensor& A_sum, at::Tensor& G_sum, const LayerCall& call,
                               at::IntArrayRef weight_shape, bool accumulate = true);

// Adds what the lookups of a weight came to, lookup_A_sum and counts as above, to the sums of its
// products (a head that is tied to an embedding). The Fisher matrix of both is a sum of two
// Kronecker products, G1 (x) A1 + G2 (x) A2 with A1 = A_sum / rows, of traces t1 and t2. It becomes
//   c (r1 G1 / tr G1 + r2 G2 / tr G2) (x) (r1 A1 / tr A1 + r2 A2 / tr A2),   r_u = sqrt(t_u).
// With c = 1 it is nowhere below the sum, and r_u are the weights with the smallest trace of which
// that is true (as pi of Martens and Grosse 2015, section 6.3); c = (t1 + t2) / (r1 + r2)^2 >= 1/2
// gives it the trace of the sum. A keeps the trace of A1. Without lookups the sums stay as they
// are. Does not wait for the device.
void add_lookup_factors_(at::Tensor& A_sum, at::Tensor& G_sum, int64_t rows,
                         const at::Tensor& lookup_A_sum, const at::Tensor& counts);

// The checks of update_kronecker_factors_() alone. Usable on tensors with symbolic sizes.
void check_kronecker_factors(const at::Tensor& A_sum, const at::Tensor& G_sum,
                             const LayerCall& call, at::IntArrayRef weight_shape);

}  // namespace torchium::gradients::detail
