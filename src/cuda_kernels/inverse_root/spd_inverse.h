// Inverses of many small symmetric positive definite matrices in one launch.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

constexpr int kLargestSpdInverse = 256;  // order

struct SpdInverse {
  const float* A;  // [matrices, n, n], contiguous; its symmetric part is used
  float* inverse;  // [matrices, n, n]: (A + damping I)^-1, exactly symmetric
  // [matrices]: whether a pivot was at most `noise` times the largest entry of A + damping I, or an
  // entry of the inverse above `largest`. The inverse of such a matrix is not written. That of a
  // matrix with NaN or Inf is NaN.
  bool* is_singular;
  int64_t matrices;
  int n;
  double damping;
  double noise;
  double largest;
};

// n from 1 to kLargestSpdInverse. Returns the launch error.
cudaError_t spd_inverse(const SpdInverse& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
