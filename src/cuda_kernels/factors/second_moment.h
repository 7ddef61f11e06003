// Sums of outer products x x^T as the Kronecker factors of K-FAC keep them.
#pragma once

#include "cuda_kernels/factors/folded_images.h"
#include "cuda_kernels/factors/moment_product.h"

#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// The order of the elements in the vectors of a product, for a target in the order of the weight.
enum class VectorOrder {
  kOfWeight,
  kPixels,  // element i of the target is element i % k * (n / k) + i / k in the product: there the
            // channels of a patch run fastest, and here its k pixels
  kFolded,  // folded_images.h: 64 elements per row of folded pixels
};

// target <- X X^T, or target + X X^T to accumulate, with a row and column more for vectors that end
// with a 1. Exactly symmetric.
struct SecondMoment {
  // X X^T: [groups, pitch, pitch], of which the first n count; with parts the workspace of a
  // moment_product().
  const float* product;
  const MomentParts* parts;  // null: none
  // Of the vectors in X: [sum_parts, groups, pitch], of which the parts are to be added; null: no
  // row more is written.
  const float* sums;
  int sum_parts;
  float* target;  // [groups, order, order]
  int groups, n, pitch, order;
  float count;  // of the vectors in X
  VectorOrder vectors;
  int pixels;           // k
  FoldedSide y{}, x{};  // of folded patches
  bool accumulate;
};

// The largest number of groups.
constexpr int kMostMoments = 65535;

cudaError_t store_second_moment(const SecondMoment& moment, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
