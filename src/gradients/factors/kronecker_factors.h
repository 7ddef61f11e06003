// The two factors of K-FAC (Martens and Grosse 2015, arXiv 1503.05671; convolutions: Grosse and
// Martens 2016, arXiv 1602.01407), as sums over the captured calls of a layer.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// The vectors a and g of a sample with several positions (Eschenhagen et al. 2023, arXiv
// 2311.00636): one pair per position, or the mean of a and the sum of g over them.
enum class WeightSharing { kExpand, kReduce };

// kOfGradients: only G, or A of an embedding or a transposed convolution; needs accumulate.
enum class UpdatedFactors { kBoth, kOfGradients };

// Sums that may be block-diagonal or Toeplitz (linalg/products/structured_matrix.h). A Toeplitz
// A_sum is that of the vectors K^T a, and a Toeplitz G_sum that of C^T g; K and C are stored like
// the sums, or have one row and column more, for a bias that a lookup does not have. Undefined: the
// identity.
struct StructuredSums {
  at::Tensor K, C;
};

// A_sum += sum of a a^T and G_sum += sum of g g^T over samples and positions: a is the input of a
// linear layer or the patch of a convolution, g the output gradient. A_sum: [groups, a, a], where a
// is the fan-in of a group, or one more, which extends each input vector by a 1 for the bias.
// G_sum: [groups, o, o], with o output channels per group. Both float32 or float64, contiguous,
// symmetric, and exactly symmetric afterwards. Without its last dimension a sum is the diagonal
// alone. ValueError for other shapes, with nothing changed. Only kind, settings and tensors of the
// call are used.
//
// An embedding with a weight [words, width] swaps the two, because its inputs are one-hot: G_sum
// [1, words] += the number of lookups of each word, always a diagonal, and A_sum [1, width, width]
// or [1, width] += sum of h h^T with h the gradient of a looked-up row. Lookups of padding_idx have
// no gradient and count in neither. Indices must be in range.
//
// A transposed convolution, with a weight [in, out / groups, ...], swaps the two as well: its
// weight is that of the convolution from its output to its input, and the gradient of a sample sums
// x p^T over the positions of its input, with x the input and p the patch of the output gradient
// that the position has been spread over. A_sum += sum of p p^T, and G_sum += sum of x x^T. It has
// no row for a bias.
//
// With kReduce a linear layer or convolution adds one vector a, and one g, per sample: the mean and
// the sum over its positions (of x and p of a transposed convolution, too). Lookups are always
// expanded.
//
// accumulate = false overwrites the sums, which need not be initialised. structured: null, for sums
// that are matrices or diagonals.
void update_kronecker_factors_(at::Tensor& A_sum, at::Tensor& G_sum, const LayerCall& call,
                               at::IntArrayRef weight_shape, bool accumulate = true,
                               WeightSharing sharing = WeightSharing::kExpand,
                               UpdatedFactors updated = UpdatedFactors::kBoth,
                               const StructuredSums* structured = nullptr);

// Adds the factors of a weight's lookups, lookup_A_sum and counts as above, to the sums of its
// products (a head tied to an embedding). The Fisher matrix of both is a sum of two Kronecker
// products, G1 (x) A1 + G2 (x) A2 with A1 = A_sum / rows, of traces t1 and t2. It is replaced by
//   c (r1 G1 / tr G1 + r2 G2 / tr G2) (x) (r1 A1 / tr A1 + r2 A2 / tr A2),   r_u = sqrt(t_u).
// With c = 1 this is an upper bound of the sum, and these r_u give the smallest trace (as pi of
// Martens and Grosse 2015, section 6.3); c = (t1 + t2) / (r1 + r2)^2 >= 1/2 gives it the trace of
// the sum. A keeps the trace of A1. Without lookups the sums are unchanged. Does not wait for the
// device.
void add_lookup_factors_(at::Tensor& A_sum, at::Tensor& G_sum, int64_t rows,
                         const at::Tensor& lookup_A_sum, const at::Tensor& counts);

// Only the checks of update_kronecker_factors_(). Usable on tensors with symbolic sizes.
void check_kronecker_factors(const at::Tensor& A_sum, const at::Tensor& G_sum,
                             const LayerCall& call, at::IntArrayRef weight_shape,
                             bool is_structured = false);

}  // namespace torchium::gradients::detail
