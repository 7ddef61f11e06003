#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/factors/unfold.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerProcessor = 8;

// The patch of one output pixel.
template <typename Element>
class Patch {
 public:
  __device__ Patch(const Unfold& u, int64_t pixel) : u_(u) {
    const int64_t line = pixel / u.output_size[1], sample = line / u.output_size[0];
    top_ = static_cast<int>(line % u.output_size[0]) * u.stride[0] - u.padding[0];
    left_ = static_cast<int>(pixel % u.output_size[1]) * u.stride[1] - u.padding[1];
    image_ = static_cast<const Element*>(u.images) + sample * u.size[0] * u.size[1] * u.channels;
  }

  // Where element `i` of the patch lies, and those of the same pixel after it; null outside.
  __device__ const Element* at(int i) const {
    const int element = i / u_.channels;
    if (element >= u_.kernel[0] * u_.kernel[1]) return nullptr;
    const int y = top_ + element / u_.kernel[1] * u_.dilation[0];
    const int x = left_ + element % u_.kernel[1] * u_.dilation[1];
    const bool inside = 0 <= y && y < u_.size[0] && 0 <= x && x < u_.size[1];
    return inside ? image_ + (int64_t{y} * u_.size[1] + x) * u_.channels + i % u_.channels
                  : nullptr;
  }

 private:
  const Unfold& u_;
  const Element* image_;
  int top_, left_;
};

// A thread writes 16 bytes at a time, a warp the patch of one output pixel. in_vectors: these are
// channels of one pixel, aligned to 16 bytes.
template <typename Element, bool in_vectors>
__global__ void __launch_bounds__(kThreads) unfold_kernel(const Unfold u) {
  constexpr int kCount = 16 / sizeof(Element);
  const int length = u.pitch / kCount;
  const int64_t pixels = u.samples * u.output_size[0] * u.output_size[1];
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t pixel = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; pixel < pixels;
       pixel += step) {
    const Patch<Element> patch(u, pixel);
    uint4* target = static_cast<uint4*>(u.patches) + pixel * length;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < length; i += 32) {
      uint4 vector{};
      if constexpr (in_vectors) {
        const Element* place = patch.at(i * kCount);
        if (place != nullptr) vector = *reinterpret_cast<const uint4*>(place);
      } else {
        auto* elements = reinterpret_cast<Element*>(&vector);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const Element* place = patch.at(i * kCount + k);
          elements[k] = place == nullptr ? Element{0} : *place;
        }
      }
      target[i] = vector;
    }
  }
}

template <typename Element>
cudaError_t launch(const Unfold& arguments, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  if (error != cudaSuccess) return error;
  const int64_t pixels = arguments.samples * arguments.output_size[0] * arguments.output_size[1];
  const int64_t blocks =
      std::min<int64_t>((pixels + kWarps - 1) / kWarps, int64_t{kBlocksPerProcessor} * processors);
  if (blocks == 0) return cudaSuccess;
  const bool in_vectors = arguments.channels * sizeof(Element) % 16 == 0 &&
                          reinterpret_cast<uintptr_t>(arguments.images) % 16 == 0;
  const auto kernel = in_vectors ? unfold_kernel<Element, true> : unfold_kernel<Element, false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

cudaError_t unfold(const Unfold& arguments, cudaStream_t stream) {
  return arguments.element_bytes == 2 ? launch<unsigned short>(arguments, stream)
                                      : launch<unsigned>(arguments, stream);
}

}  // namespace torchium::cuda_kernels
