// The cuSOLVER of torch's installation, loaded at first use, as torch does. Nothing here links
// against it: `import torchium` needs no cuSOLVER.
#pragma once

#ifdef TORCHIUM_WITH_CUDA

#include <cstddef>
#include <cusolverDn.h>
#include <mutex>
#include <vector>

namespace torchium::detail {

// The functions used, resolved once per process.
struct CusolverFunctions {
  decltype(&::cusolverDnCreate) create;
  decltype(&::cusolverDnSetStream) set_stream;
  decltype(&::cusolverDnCreateParams) create_params;
  decltype(&::cusolverDnXsyevBatched_bufferSize) syev_batched_buffer_size;
  decltype(&::cusolverDnXsyevBatched) syev_batched;
};

// Raises RuntimeError if no cuSOLVER with these functions can be loaded.
const CusolverFunctions& cusolver();

// Raises RuntimeError with the name of the call unless `status` is a success.
void check_cusolver(cusolverStatus_t status, const char* call);

// Exclusive use, by the calling thread, of a handle of the current device. Each stream has its own.
// During CUDA graph capture none can be created, so any handle of the device is used. Handles live
// until the process ends: the driver may be gone before a destructor would run.
class CusolverLease {
 public:
  // Raises RuntimeError if `stream` is captured and the device has no handle yet.
  explicit CusolverLease(cudaStream_t stream);

  cusolverDnHandle_t handle() const { return entry_->handle; }
  cusolverDnParams_t params() const { return entry_->params; }

  // Host memory of at least `bytes`, kept with the handle.
  void* host_workspace(std::size_t bytes);

 private:
  struct Entry {
    cusolverDnHandle_t handle = nullptr;
    cusolverDnParams_t params = nullptr;
    std::vector<char> host_workspace;
  };

  std::lock_guard<std::mutex> lock_;  // calls launch and return: one lock for all devices
  Entry* entry_;
};

}  // namespace torchium::detail

#endif
