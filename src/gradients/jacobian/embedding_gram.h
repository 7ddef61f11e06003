// Inner products of an embedding's Jacobian rows, by their common indices.
#pragma once

#include "gradients/jacobian/jacobian_block.h"
#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::gradients::detail {

// rows[i, k, :] = the sum of e[i, t, :] over all t with indices[i, t] = k: [n, table_rows, dim].
TORCHIUM_API at::Tensor scatter_lookups(const at::Tensor& indices, const at::Tensor& e,
                                        int64_t table_rows);

// The squared norm of each rows[i]: [n] float64, without the rows. On any device, without a host
// synchronisation. Takes memory of the size of e.
TORCHIUM_API at::Tensor squared_lookup_norms(const at::Tensor& indices, const at::Tensor& e,
                                             int64_t table_rows);

// K_ij += weight * sum over t and s with indices[i, t] = indices[j, s] of e[i, t] . e[j, s].
// K: [n, n] float64, contiguous; indices: [n, T] int64 below `table_rows`; e: [n, T, dim] float32
// or float64. On any device, without a host synchronisation. Costs a product of the scattered rows,
// with as many columns of e at a time as `max_workspace` elements hold (at least one).
TORCHIUM_API void add_embedding_gram_(at::Tensor& K, const at::Tensor& indices, const at::Tensor& e,
                                      int64_t table_rows, double weight,
                                      int64_t max_workspace = kMaxWorkspaceElements);

// The same, on a CPU only. Costs one inner product per pair of samples and table row that both have
// looked up.
TORCHIUM_API void add_embedding_gram_on_cpu_(at::Tensor& K, const at::Tensor& indices,
                                             const at::Tensor& e, double weight);

}  // namespace torchium::gradients::detail
