#include "cuda_kernels/common/philox.h"
#include "cuda_kernels/common/random_signs.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 8192;

// One thread writes four signs at a time.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    random_signs_kernel(T* out, int64_t rows, int64_t n, uint64_t seed, uint64_t first_stream) {
  const int64_t groups = (n + 3) / 4;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * groups; i += stride) {
    const int64_t row = i / groups;
    write_signs(out + row * n, n, seed, first_stream + row, i % groups);
  }
}

}  // namespace

template <typename T>
void random_signs(T* out, int64_t rows, int64_t n, uint64_t seed, uint64_t first_stream,
                  cudaStream_t stream) {
  if (rows == 0 || n == 0) return;
  const int64_t blocks = std::min(kMaxBlocks, (rows * ((n + 3) / 4) + kThreads - 1) / kThreads);
  random_signs_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(out, rows, n, seed,
                                                                              first_stream);
}

template void random_signs(float*, int64_t, int64_t, uint64_t, uint64_t, cudaStream_t);
template void random_signs(double*, int64_t, int64_t, uint64_t, uint64_t, cudaStream_t);

}  // namespace torchium::cuda_kernels
