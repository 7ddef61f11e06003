// The vectors that a layer multiplies at each of its positions, as fp16 parts (split_fp16.h) for
// products over the positions of a sample.
#pragma once

#include "cuda_kernels/split_gemm/split_fp16.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// parts [samples, channels * kernel height * kernel width, pitch] <- the patches of images, their
// elements in the order of a convolution's weight, and zeros beyond the positions, output height *
// output width. Each sample has a scale of its own. Linear layers: positions are the pixels of an
// image of height 1, and the kernel is 1 x 1. Arrays hold the value for the height and that for the
// width.
struct SplitPositions {
  const float* images;  // the elements of a sample are contiguous, in the order of these strides
  int64_t strides[4];   // of sample, channel, row and column
  int channels;
  int size[2], kernel[2], output_size[2];
  int stride[2], padding[2], dilation[2];
  float* sums;  // [samples, channels] <- those over the positions; null: not computed. Only for
                // images whose channels are contiguous, without gaps.
  unsigned* largest;  // [samples]: zeros, then the largest magnitude of each sample, as float bits
  SplitFp16 parts;    // rows: of a sample; columns: pitch, a multiple of 8; has_scales
};

// Both operands of a product, in two launches.
cudaError_t split_positions(const SplitPositions& A, const SplitPositions& G, int samples,
                            cudaStream_t stream);

}  // namespace torchium::cuda_kernels
