// Memory of the GPU and of the host, in bytes. Works in every build; without a GPU all is zero.
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

// Of `device`, the current CUDA device by default. All zero and not available for a CPU device or
// on a machine without CUDA. c10::ValueError: no such CUDA device, or another kind of device.
TORCHIUM_API CudaMemoryInfo cuda_memory_info(std::optional<c10::Device> device = std::nullopt);

// What an allocation on the device could get: for CUDA the free memory of the driver and what
// PyTorch's allocator holds unused; for the CPU the memory available on the machine, or left in the
// process' control group if that is less.
TORCHIUM_API int64_t free_memory(c10::Device device);

}  // namespace torchium
