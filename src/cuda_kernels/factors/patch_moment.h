// The Kronecker factor of the inputs of a 3 x 3 convolution, from the products of shifted images.
#pragma once

#include "cuda_kernels/factors/patch_products.h"

#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// The first 9 * channels rows and columns of the target <- the sum of a a^T over the patches a,
// plus the target to accumulate. Patches are in the order of the weight: channels, and then the
// pixels of each. Exactly symmetric.
struct PatchMoment {
  const PatchProducts* products;
  const MomentParts* parts;  // of the product
  const float* workspace;    // of its moment_product()
  float* target;             // [order, order]
  int order;
  bool accumulate;
};

cudaError_t store_patch_moment(const PatchMoment& moment, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
