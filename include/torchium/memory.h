// GPU and host memory in bytes. Works in every build; GPU values are zero without a GPU.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
// PyTorch's allocator, within the fraction of the device that this process may reserve
// (torch.cuda.set_per_process_memory_fraction). CPU: the machine's available memory, or that of the
// process's control group if it is less.
TORCHIUM_API int64_t free_memory(c10::Device device);

// Total, available and used memory. `allocated` and `cached` of a CPU are zero.
struct MemoryInfo {
  int64_t total = 0;             // of the device, or of the machine
  int64_t available = 0;         // free_memory(device)
  int64_t allocated = 0;         // in live tensors of this process
  int64_t cached = 0;            // reserved by PyTorch's allocator, live tensors included
  int64_t arena = 0;             // held by efficient_tensor_creation, live tensors included
  int64_t arena_in_use = 0;      // of that, in live tensors
  int64_t workspace_limit = -1;  // set_workspace_limit(); -1: none
};

// Of `device`, by default the current CUDA device if there is one, else the CPU. c10::ValueError:
// as cuda_memory_info, or a CUDA device without CUDA.
TORCHIUM_API MemoryInfo memory_info(std::optional<c10::Device> device = std::nullopt);

// What one owner holds between calls: an optimizer's group of parameters on one device, or the
// arena of a device. Scratch that kernels need for one call does not count: it returns to PyTorch's
// allocator.
struct WorkspaceUse {
  std::string owner;  // "Shampoo", "Arena", ...
  c10::Device device = c10::kCPU;
  int64_t parameters = 0;     // tensors
  int64_t state_bytes = 0;    // of the optimizer's state on this device
  int64_t scratch_bytes = 0;  // workspace and captured steps, or memory of the arena
};

// All owners of this process, the largest first. Call it between steps: a step on another thread
// may change what it counts.
TORCHIUM_API std::vector<WorkspaceUse> workspace_report();

// Bounds three things, for the whole process: the default max_workspace_bytes of
// linalg::chunked_matmul, the fp16 copy of a large matrix by which linalg::hutchinson_trace and
// hutchinson_diagonal multiply on Hopper (without it they multiply in float32), and what the arena
// of a device keeps. Nothing else: other functions and the optimizers take the scratch that they
// need, and their state is not limited. std::nullopt, the default: no limit. c10::ValueError: bytes
// is negative.
TORCHIUM_API void set_workspace_limit(std::optional<int64_t> bytes);
TORCHIUM_API std::optional<int64_t> workspace_limit();

// Zeros of `shape`, in memory of the device's arena: blocks that are kept and reused as soon
// as all tensors of a block are gone. device: by default the CPU; dtype: torch's default.
//
// For short-lived tensors of one stream. A block belongs to the current stream: work on another
// stream must have finished with its tensors before they are freed. A tensor that lives on keeps
// its whole block (2 MiB, or the size of the tensor). Beyond workspace_limit() and in a CUDA graph
// capture the memory is PyTorch's. c10::ValueError: a negative size.
TORCHIUM_API at::Tensor efficient_tensor_creation(
    at::IntArrayRef shape, std::optional<c10::Device> device = std::nullopt,
    std::optional<at::ScalarType> dtype = std::nullopt);

// Gives the blocks without live tensors back to PyTorch's allocator.
TORCHIUM_API void release_arenas();

}  // namespace torchium
