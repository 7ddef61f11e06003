// Batches of square matrices of a structure, stored compactly.
//
//   dense            [batch, n, n]
//   block-diagonal   [batch, n, b], 1 < b < n: row i has the b entries of its block; the rows of a
//                    shorter last block end with zeros
//   Toeplitz         [batch, n, 1], n > 1: lower triangular, as its first column
//   diagonal         [batch, n]
//
// Products of n x n matrices of one structure have that structure. A symmetric matrix S is brought
// into it by the projection P of Lin et al. 2024 (arXiv 2312.05705), for which <P(S), N> =
// <S, N> for the mean of each parameter of N: it keeps the blocks or the diagonal, and a Toeplitz
// matrix gets the mean of the diagonal and twice the means of the diagonals below it.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::linalg::detail {

enum class Structure { kDense, kBlockDiagonal, kToeplitz, kDiagonal };

// Of a stored batch.
TORCHIUM_API Structure structure_of(const at::Tensor& M);
// Sizes of a stored batch of matrices of order n. A block of all rows is a dense matrix.
TORCHIUM_API std::vector<int64_t> stored_sizes(int64_t batch, int64_t n, Structure structure,
                                               int64_t block);

// M X, or M^T X, with X [batch, n, columns]. The cost per column is that of the structure: n^2, n
// b, n log n (by FFT) or n.
TORCHIUM_API at::Tensor structured_multiply(const at::Tensor& M, const at::Tensor& X,
                                            bool transposed = false);

// M N, stored like both.
TORCHIUM_API at::Tensor structured_product(const at::Tensor& M, const at::Tensor& N);

// P(M^T M)
TORCHIUM_API at::Tensor structured_gram(const at::Tensor& M);

// P(M^T S M), with S = P(S) stored like M. A Toeplitz matrix needs more of S than that: then S must
// be P(M^T S M) already, as structured_moment() makes it.
TORCHIUM_API at::Tensor structured_congruence(const at::Tensor& M, const at::Tensor& S);

// P(X X^T), or for Toeplitz matrices P(M^T X X^T M), in the storage of `sizes`, with X [batch, n,
// count]; M undefined: the identity.
TORCHIUM_API at::Tensor structured_moment(const at::Tensor& X, at::IntArrayRef sizes,
                                          const at::Tensor& M = {});

// M + value I, in place. M must be contiguous.
TORCHIUM_API void add_to_diagonal_(at::Tensor& M, double value);

// The diagonal, [batch, n].
TORCHIUM_API at::Tensor structured_diagonal(const at::Tensor& M);

// tr(M) / n, [batch].
TORCHIUM_API at::Tensor average_trace(const at::Tensor& M);

// The largest sum of magnitudes in a row, [batch]: a bound of the spectral norm of symmetric
// matrices, and of triangular Toeplitz matrices.
TORCHIUM_API at::Tensor largest_row_sum(const at::Tensor& M);

}  // namespace torchium::linalg::detail
