#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/factors/folded_images.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;
constexpr int kElements = FoldedImages::kElements;

// A thread writes a folded pixel at a time.
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const FoldedImages f, int rows, int columns, int64_t pixels) {
  const auto* images = static_cast<const unsigned short*>(f.images);
  const int line = f.x.size * f.channels;     // elements of a row of an image
  const int width = f.x.stride * f.channels;  // of a row of a folded pixel
  const auto step = int64_t{gridDim.x} * kThreads;
  for (int64_t pixel = int64_t{blockIdx.x} * kThreads + threadIdx.x; pixel < pixels;
       pixel += step) {
    const int64_t row = pixel / columns;
    const int first = (static_cast<int>(pixel - row * columns) - f.x.before) * width;
    const int64_t sample = row / rows;
    const int top = static_cast<int>(row - sample * rows) * f.y.stride;
    uint4 vectors[2]{};
    auto* values = reinterpret_cast<unsigned short*>(vectors);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int y = top + i / width, place = first + i % width;
      if (i / width < f.y.stride && y < f.y.size && place >= 0 && place < line) {
        values[i] = images[(sample * f.y.size + y) * line + place];
      }
    }
    auto* target = static_cast<uint4*>(f.folded) + 2 * pixel;
    target[0] = vectors[0];
    target[1] = vectors[1];
  }
}

}  // namespace

cudaError_t fold(const FoldedImages& arguments, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  if (error != cudaSuccess) return error;
  const int64_t pixels = arguments.elements() / kElements;
  const int64_t blocks = std::min<int64_t>((pixels + kThreads - 1) / kThreads,
                                           int64_t{kBlocksPerProcessor} * processors);
  if (blocks == 0) return cudaSuccess;
  fold_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      arguments, arguments.y.folded(), arguments.columns(), pixels);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
