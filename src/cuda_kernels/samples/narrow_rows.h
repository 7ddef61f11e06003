// Gradients of samples with respect to the weight of a convolution with few inputs.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// rows[i] = sum over the positions t of G[i, :, t] A[i, :, t]^T, with output gradients G and
// patches A of the input: in float32, without patches in memory. Arrays hold the value for the
// height and that for the width.
struct NarrowRows {
  static constexpr int kMostInputs = 31;

  const float* input;  // [samples, channels, size[0], size[1]], with these strides
  int64_t strides[4];
  int channels;
  int size[2], kernel[2], output_size[2];
  int stride[2], padding[2], dilation[2];
  const float* gradient;  // [samples, fan_out, output_size[0], output_size[1]], contiguous
  int fan_out;
  int samples;
  float* rows;  // [samples, fan_out, channels * kernel[0] * kernel[1]], at most kMostInputs
  float* sums;  // [samples, fan_out] <- sum over t of G[i, :, t]: the gradients of the bias
};

cudaError_t narrow_rows(const NarrowRows& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
