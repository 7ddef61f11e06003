// Inner products of the rows of a Jacobian that belong to an embedding, by what they share.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// K_ij += weight * sum over t and s with indices[i, t] = indices[j, s] of e[i, t] . e[j, s].
// K: [n, n] float64, contiguous; indices: [n, T] int64; e: [n, T, dim] float32 or float64. CPU
// only. Costs one inner product a pair of samples and row of the table that both have looked up.
void add_embedding_gram_on_cpu_(at::Tensor& K, const at::Tensor& indices, const at::Tensor& e,
                                double weight);

}  // namespace torchium::gradients::detail
