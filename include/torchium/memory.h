// GPU and host memory in bytes. Works in every build; GPU values are zero without a GPU.
#pragma once

#include <torchium/export.h>

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace torchium {

struct CudaMemoryInfo {
  int64_t total_memory = 0;      // of the device, according to the driver
  int64_t free_memory = 0;       // not allocated by any process, according to the driver
  int64_t allocated_memory = 0;  // in live tensors of this process
  int64_t cached_memory = 0;     // reserved by PyTorch's allocator, live tensors included
  bool available = false;        // whether the device exists
};

// The memory of `device`, by default the current CUDA device. For a CPU device, or without CUDA,
// all values are zero and `available` is false. c10::ValueError: the CUDA device does not exist, or
// the device is neither CUDA nor CPU.
TORCHIUM_API CudaMemoryInfo cuda_memory_info(std::optional<c10::Device> device = std::nullopt);

// The memory available for allocation. CUDA: the driver's free memory plus the unused memory of
// PyTorch's allocator. CPU: the machine's available memory, or that of the process's control group
// if it is less.
TORCHIUM_API int64_t free_memory(c10::Device device);

}  // namespace torchium
