// A symmetric matrix times a few vectors, in one pass over one of its triangles.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// Y = X A: Y[k, i] = sum_j A[i, j] X[k, j] for a symmetric A. A [n, n], X and Y [count, n],
// contiguous, 16-byte aligned; count from 1 to 8. Of A only tiles of 128 x 128 on and below the
// diagonal are read, half as many bytes as by a general product. Each product is three of TF32,
// with errors as in float32.
struct SymmetricBlockProduct {
  const float* A;
  const float* X;
  float* Y;
  int64_t n;  // a multiple of 4
  int count;
  float* workspace;  // symmetric_block_product_workspace(n) numbers, 16-byte aligned
};

// Whether a device of this compute capability, with so much shared memory per block, can run the
// kernel, which is for Hopper.
bool has_symmetric_block_product(int major, int minor, int shared_bytes);

cudaError_t symmetric_block_product_workspace(int64_t n, int64_t& numbers);

// Two launches; the order of every sum is fixed for a device. Returns the error of a launch.
cudaError_t symmetric_block_product(const SymmetricBlockProduct& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
