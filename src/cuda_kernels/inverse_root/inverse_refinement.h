// A step of Newton's method for the inverses of some matrices of a batch.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// Everything is [matrices, n, n], float32 and contiguous, and nothing overlaps.
struct InverseRefinement {
  const float* A;      // its symmetric part is used
  const float* X;      // about (A + damping I)^-1, symmetric
  float* residual;     // workspace: I - (A + damping I) X, of sums in float64
  float* inverse;      // X + X residual, exactly symmetric; X where that is not finite
  const bool* wanted;  // [matrices]: the others are neither read nor written
  int64_t matrices;
  int n;
  double damping;
};

// Returns the launch error.
cudaError_t refine_inverse(const InverseRefinement& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
