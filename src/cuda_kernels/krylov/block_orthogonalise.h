// Block Gram-Schmidt for a few long rows.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

constexpr bool can_orthogonalise(int64_t block) {
  return block == 1 || block == 2 || block == 4 || block == 8;
}

// The rows V [known, n], orthonormal; W [block, n]; and `block` random ones, one below the other in
// `rows`. W becomes Q, orthonormal and orthogonal to V, with W = C^T V + R^T Q. What is left of a
// row of W after the projection may be a rounding error: then a random row replaces it, and its
// part in R is zero.
struct BlockOrthogonalise {
  float* rows;  // [known + 2 block, n]
  int64_t n;
  int known;
  int block;           // can_orthogonalise
  double epsilon;      // of |W[i]|: no more than this is left: a rounding error
  double noise;        // of a normalised row, after the second projection, likewise
  double* projection;  // [known + block, block]: C above R; null: not wanted
  int64_t row_stride;  // of `projection`
  double* workspace;   // block_orthogonalise_workspace() numbers
};

int64_t block_orthogonalise_workspace(int known, int block, int64_t n);

// Eight launches; the order of every sum is fixed. Returns the error of a launch.
cudaError_t block_orthogonalise(const BlockOrthogonalise& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
