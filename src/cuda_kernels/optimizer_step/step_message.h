// The message of a step (message_slots.h) on a GPU, in one launch each.
#pragma once

#include "cuda_kernels/optimizer_step/message_slots.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// The numbers that the host knows, as an argument of the kernel: nothing is copied beforehand.
struct HostNumbers {
  int64_t values[kMessageSize];
};

// Numbers that only the device knows, in place of the host's. Null: the host's.
struct DeviceNumbers {
  const float* found_inf;
  const int64_t* failure;
  const int* unfit;  // of the groups, as in the message
  int groups;
};

cudaError_t pack_message(const HostNumbers& host, const DeviceNumbers& on_device, int64_t* message,
                         cudaStream_t stream);

// skipped[g]: 0 if all ranks take the step of the group, else 1.
cudaError_t find_skipped_groups(const int64_t* message, int groups, float* skipped,
                                cudaStream_t stream);

// Copies the message to `kept`, and counts in `skips` [kMostMessageGroups] the steps in a row that
// gradients have skipped. Infinities that a GradScaler has found leave the count as it is.
cudaError_t keep_message(const int64_t* message, int64_t* kept, int64_t* skips,
                         cudaStream_t stream);

}  // namespace torchium::cuda_kernels
