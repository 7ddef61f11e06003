#include "support/stream_capture.h"

#ifdef TORCHIUM_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::detail {

bool is_capturing(c10::Device device) {
#ifdef TORCHIUM_WITH_CUDA
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

}  // namespace torchium::detail
