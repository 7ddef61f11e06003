// A matrix times a few vectors, in one pass over the matrix.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

constexpr int kMostBlockRows = 8;

// Y = X A^T: Y[k, i] = sum_j A[i, j] X[k, j]. A [m, n], X [count, n], Y [count, m], contiguous;
// m, n > 0 and count from 1 to kMostBlockRows. T: float or double. The caller checks
// cudaGetLastError().
template <typename T>
void row_block_product(const T* A, const T* X, T* Y, int64_t m, int64_t n, int count,
                       cudaStream_t stream);

extern template void row_block_product(const float*, const float*, float*, int64_t, int64_t, int,
                                       cudaStream_t);
extern template void row_block_product(const double*, const double*, double*, int64_t, int64_t, int,
                                       cudaStream_t);

}  // namespace torchium::cuda_kernels
