// The patches that a convolution multiplies by its weight, of images whose channels lie side by
// side.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// patches [samples, output height, output width, pitch] <- images [samples, height, width,
// channels]: the kernel height * kernel width * channels elements of a patch in this order, then
// zeros; zero too outside of an image. Images are contiguous. Arrays hold the value for the height
// and that for the width.
struct Unfold {
  const void* images;
  void* patches;  // aligned to 16 bytes
  int64_t samples;
  int size[2], output_size[2], kernel[2];
  int stride[2], padding[2], dilation[2];
  int channels;
  int pitch;  // a multiple of 16 bytes
  int element_bytes;
};

cudaError_t unfold(const Unfold& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
