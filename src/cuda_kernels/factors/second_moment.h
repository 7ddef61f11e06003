// Sums of outer products x x^T as the Kronecker factors of K-FAC keep them.
#pragma once

#include "cuda_kernels/factors/moment_product.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// target <- X X^T, or target + X X^T to accumulate, with a row and column more for vectors that end
// with a 1. Exactly symmetric.
struct SecondMoment {
  // X X^T: [groups, pitch, pitch], of which the first n count; with parts the workspace of a
  // moment_product().
  const float* product;
  const MomentParts* parts;  // null: none
  // Of the vectors in X: [sum_parts, groups, pitch], of which the parts are to be added; null: the
  // target has no row more.
  const float* sums;
  int sum_parts;
  float* target;  // [groups, order, order], order = n, or n + 1 with sums
  int groups, n, pitch;
  float count;  // of the vectors in X
  // Element i of a vector, in the target, is element i % k * (n / k) + i / k in the product: there
  // the channels of a patch run fastest, and here its k pixels. 1: the same order in both.
  int pixels;
  bool accumulate;
};

// The largest number of groups.
constexpr int kMostMoments = 65535;

cudaError_t store_second_moment(const SecondMoment& moment, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
