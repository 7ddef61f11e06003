// Independent signs, +1 or -1 with equal probability (Rademacher variables).
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// out[i, j] is sign j of stream first_stream + i of `seed`; out: [rows, n], contiguous. T: float or
// double. The caller checks cudaGetLastError().
template <typename T>
void random_signs(T* out, int64_t rows, int64_t n, uint64_t seed, uint64_t first_stream,
                  cudaStream_t stream);

extern template void random_signs(float*, int64_t, int64_t, uint64_t, uint64_t, cudaStream_t);
extern template void random_signs(double*, int64_t, int64_t, uint64_t, uint64_t, cudaStream_t);

}  // namespace torchium::cuda_kernels
