// Products of commuting symmetric matrices in nearly float32 precision, on Hopper's tensor cores.
#pragma once

#include "cuda_kernels/split_gemm/split_matrices.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// C = a I + b A B + c D + d E. Only tiles on and below the diagonal are computed; C is exactly
// symmetric.
struct SymmetricProduct {
  SplitMatrices A, B, C;   // C is none of the others
  SplitMatrices D{}, E{};  // without data: left out
  // Replaces B, and A if that is the same, for matrices that start at latest_start. Without data:
  // B.
  SplitMatrices first_B{};
  int64_t matrices;
  int n;                                // of the part that is not padding
  const float* coefficients = nullptr;  // [matrices, 4]: a, b, c, d of each; null: see factor
  // Without coefficients, C = f A B with f = 1, or this for matrices that start at latest_start.
  float latest_factor = 1;
  const int* starts;  // [matrices]: those that start after latest_start are skipped
  int latest_start;
  // The least of starts. If it is above latest_start, the launch ends at once. Null: unknown.
  const int* first_start = nullptr;
  // Operands whose lo parts count as zero. A single product takes a third of the arithmetic.
  bool single = false;  // A, B and E
  bool single_D = false;
  bool single_C = false;
  // The tensor cores truncate as they accumulate, so sums over this many terms, a multiple of 32,
  // are added in float32. A single product has one sum.
  int terms_per_sum = 256;
  float* squares = nullptr;  // [matrices, product_sums]: they add up to |C|_F^2; null: not computed
};

// The number of partial sums of squares of a matrix.
int product_sums(int order);

// Whether this build and the current device (compute capability, shared memory per block) have the
// kernel.
bool has_symmetric_product(int major, int minor, int shared_bytes);

// Returns the launch error.
cudaError_t symmetric_product(const SymmetricProduct& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
