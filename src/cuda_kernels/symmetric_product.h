// Products of commuting symmetric matrices in nearly float32 precision, on the tensor cores of
// Hopper.
#pragma once

#include "cuda_kernels/split_matrices.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// C = alpha (a I + b A + c A B) with the coefficients of each matrix, or C = alpha A B. Only the
// lower triangle is computed; it is mirrored.
struct SymmetricProduct {
  SplitMatrices A, B, C;  // C is neither A nor B
  int64_t matrices;
  int n;  // of the part that is not padding
  float alpha;
  const float* coefficients;  // [matrices, 3]: a, b, c; null: 0, 0, 1
  const int* steps;           // [matrices]: matrices with steps <= step are left alone
  int step;
  // The tensor cores truncate as they accumulate: sums over this many stages of 64 products are
  // added in float32.
  int stages_per_sum;
};

// Whether this build and the current device (its compute capability and the shared memory that a
// block may have) have the kernel.
bool has_symmetric_product(int major, int minor, int shared_bytes);

// Returns the error of the launch.
cudaError_t symmetric_product(const SymmetricProduct& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
