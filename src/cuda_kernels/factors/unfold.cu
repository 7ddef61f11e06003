#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/factors/unfold.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;
constexpr int kTableElements = 2048;  // of a patch, per block
constexpr int kOutside = 1 << 30;     // as a place: outside of every image

constexpr int64_t kMostVectors = int64_t{1} << 31;  // 32 GiB

// Output pixels of all samples.
__host__ __device__ int64_t pixels_of(const Unfold& p) {
  return p.samples * p.output_size[0] * p.output_size[1];
}

// An element of a patch, from the patch's first pixel.
struct alignas(16) PatchElement {
  int offset, y, x;
};

__device__ PatchElement patch_element(const Unfold& p, int i) {
  const int pixel = i / p.channels;
  if (pixel >= p.kernel[0] * p.kernel[1]) return {0, kOutside, 0};
  const int y = pixel / p.kernel[1] * p.dilation[0], x = pixel % p.kernel[1] * p.dilation[1];
  return {(y * p.size[1] + x) * p.channels + i % p.channels, y, x};
}

// The patch of one output pixel.
template <typename Element>
class Patch {
 public:
  __device__ Patch(const Unfold& u, int pixel) : p_(u) {
    const int line = pixel / p_.output_size[1], sample = line / p_.output_size[0];
    top_ = line % p_.output_size[0] * p_.stride[0] - p_.padding[0];
    left_ = pixel % p_.output_size[1] * p_.stride[1] - p_.padding[1];
    first_ = static_cast<const Element*>(u.images) +
             ((int64_t{sample} * p_.size[0] + top_) * p_.size[1] + left_) * p_.channels;
  }

  // Null outside of the image.
  __device__ const Element* at(const PatchElement& element) const {
    const auto y = static_cast<unsigned>(top_ + element.y);
    const auto x = static_cast<unsigned>(left_ + element.x);
    const bool inside =
        y < static_cast<unsigned>(p_.size[0]) && x < static_cast<unsigned>(p_.size[1]);
    return inside ? first_ + element.offset : nullptr;
  }

 private:
  const Unfold& p_;
  const Element* first_;
  int top_, left_;
};

// A thread writes 16 bytes at a time. in_vectors: these are channels of one pixel, aligned to 16
// bytes. A block writes kTableElements elements of each patch at most.
template <typename Element, bool in_vectors>
__global__ void __launch_bounds__(kThreads) unfold_kernel(const Unfold u) {
  constexpr int kCount = 16 / sizeof(Element);
  constexpr int kPlaces = in_vectors ? 1 : kCount;  // per vector
  __shared__ PatchElement table[kPlaces][kTableElements / kCount];
  const int begin = static_cast<int>(blockIdx.y) * kTableElements;
  const int length = min(kTableElements, u.pitch - begin) / kCount;
  for (int i = static_cast<int>(threadIdx.x); i < length; i += kThreads) {
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      table[k][i] = patch_element(u, begin + i * kCount + k);
    }
  }
  __syncthreads();
  // In 32 bits, of which divisions take a fraction of the time.
  const auto vectors = static_cast<unsigned>(pixels_of(u) * length);
  for (unsigned v = blockIdx.x * kThreads + threadIdx.x; v < vectors; v += gridDim.x * kThreads) {
    const int pixel = static_cast<int>(v / static_cast<unsigned>(length));
    const int i = static_cast<int>(v - static_cast<unsigned>(pixel) * length);
    const Patch<Element> patch(u, pixel);
    uint4 vector{};
    if constexpr (in_vectors) {
      const Element* place = patch.at(table[0][i]);
      if (place != nullptr) vector = *reinterpret_cast<const uint4*>(place);
    } else {
      auto* values = reinterpret_cast<Element*>(&vector);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const Element* place = patch.at(table[k][i]);
        values[k] = place == nullptr ? Element{0} : *place;
      }
    }
    static_cast<uint4*>(u.patches)[(int64_t{pixel} * u.pitch + begin) / kCount + i] = vector;
  }
}

template <typename Element>
cudaError_t launch(const Unfold& arguments, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  if (error != cudaSuccess) return error;
  const int64_t bytes = std::min(kTableElements, arguments.pitch) * sizeof(Element);
  const int64_t vectors = pixels_of(arguments) * (bytes / 16);
  if (vectors > kMostVectors) return cudaErrorInvalidValue;
  const dim3 blocks(
      static_cast<unsigned>(std::min<int64_t>((vectors + kThreads - 1) / kThreads,
                                              int64_t{kBlocksPerProcessor} * processors)),
      (arguments.pitch + kTableElements - 1) / kTableElements);
  if (blocks.x == 0) return cudaSuccess;
  const bool in_vectors = arguments.channels * sizeof(Element) % 16 == 0 &&
                          reinterpret_cast<uintptr_t>(arguments.images) % 16 == 0;
  const auto kernel = in_vectors ? unfold_kernel<Element, true> : unfold_kernel<Element, false>;
  kernel<<<blocks, kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

cudaError_t unfold(const Unfold& arguments, cudaStream_t stream) {
  return arguments.element_bytes == 2 ? launch<unsigned short>(arguments, stream)
                                      : launch<unsigned>(arguments, stream);
}

}  // namespace torchium::cuda_kernels
