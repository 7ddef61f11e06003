// Memory of the GPU and of the host, in bytes. Works in every build; without a GPU all are zero.
#pragma once

#include <torchium/export.h>

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace torchium {

struct CudaMemoryInfo {
  int64_t total_memory = 0;      // of the device, as its driver counts
  int64_t free_memory = 0;       // not allocated by any process, as the driver counts
  int64_t allocated_memory = 0;  // in live tensors of this process
  int64_t cached_memory = 0;     // reserved by PyTorch's allocator, live tensors included
  bool available = false;        // whether there is such a device
};

// The memory of `device`, by default the current CUDA device. For a CPU device, or without CUDA,
// all are zero and `available` is false. c10::ValueError: there is no such CUDA device, or the
// device is of another kind.
TORCHIUM_API CudaMemoryInfo cuda_memory_info(std::optional<c10::Device> device = std::nullopt);

// How much an allocation on the device could get. CUDA: the free memory of the driver plus the
// unused memory of PyTorch's allocator. CPU: the available memory of the machine, or what is left
// in the control group of the process if that is less.
TORCHIUM_API int64_t free_memory(c10::Device device);

}  // namespace torchium
