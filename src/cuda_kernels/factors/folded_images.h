// Images with few channels, folded so that a strided convolution becomes one of stride 1: its
// patches are then read in place.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// Along a side of the image. Folded pixel f is the `stride` pixels from stride * f on. Pixel k of
// the patch of output pixel p is pixel stride * p + k - padding, which is pixel (k + offset) %
// stride of folded pixel p - before + (k + offset) / stride.
struct FoldedSide {
  int size, output_size, kernel, stride;
  int before;  // folded pixels before the first that the first patch covers
  int offset;

  FoldedSide() = default;
  FoldedSide(int size, int output_size, int kernel, int stride, int padding)
      : size(size),
        output_size(output_size),
        kernel(kernel),
        stride(stride),
        before((padding + stride - 1) / stride),
        offset(before * stride - padding) {}

  // Folded pixels of the image, and of a patch.
  int folded() const { return (size + stride - 1) / stride; }
  int of_patch() const { return (kernel - 1 + offset) / stride + 1; }
};

// images [samples, height, width, channels], contiguous, to folded [samples, y.folded(), columns(),
// 16]: the pixels of a folded pixel, row by row, and zeros. Zeros too where there is no image,
// which the columns have before and after it, so that of_patch() columns from column p on belong to
// the patch of output pixel p. 16-bit elements.
struct FoldedImages {
  static constexpr int kElements = 16;   // of a folded pixel
  static constexpr int kMostPixels = 4;  // folded, of a patch, along a side

  const void* images;
  void* folded;  // aligned to 16 bytes
  int64_t samples;
  int channels;
  FoldedSide y, x;

  int columns() const { return x.output_size + x.of_patch() - 1; }
  int64_t elements() const { return samples * y.folded() * columns() * kElements; }
  bool fits() const {
    return channels * y.stride * x.stride <= kElements && y.of_patch() <= kMostPixels &&
           x.of_patch() <= kMostPixels;
  }
};

cudaError_t fold(const FoldedImages& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
