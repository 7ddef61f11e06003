// The grid size of persistent kernels.
#pragma once

#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// The number of multiprocessors of the current device.
inline cudaError_t count_processors(int& processors) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess
             ? error
             : cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace torchium::cuda_kernels
