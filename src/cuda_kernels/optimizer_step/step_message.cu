#include "cuda_kernels/optimizer_step/step_message.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kMessageThreads = 288;
static_assert(kMessageThreads >= kMessageSize);

__global__ void __launch_bounds__(kMessageThreads)
    pack_message_kernel(const __grid_constant__ HostNumbers host, DeviceNumbers on_device,
                        int64_t* message) {
  const int i = static_cast<int>(threadIdx.x), group = (i - kGroups) / 2;
  if (i >= kMessageSize) return;
  int64_t value = host.values[i];
  if (i == kFoundInf && on_device.found_inf != nullptr) {
    value = *on_device.found_inf != 0 ? 1 : 0;
  } else if (i == kFailure && on_device.failure != nullptr) {
    value = *on_device.failure;
  } else if (i >= kGroups && (i - kGroups) % 2 == 0 && group < on_device.groups &&
             on_device.unfit != nullptr) {
    value = on_device.unfit[group];
  }
  message[i] = value;
}

__device__ bool is_unfit(const int64_t* message, int group) {
  return message[kGroups + 2 * group] != 0;
}

__global__ void __launch_bounds__(kMostMessageGroups)
    find_skipped_groups_kernel(const int64_t* message, float* skipped) {
  bool all = false;
  for (int i = 0; i <= kFoundInf; ++i) {
    all |= message[i] != 0;
  }
  for (int i = kSetup; i < kCounts; i += 2) {
    all |= message[i] + message[i + 1] != 0;
  }
  const int group = static_cast<int>(threadIdx.x);
  skipped[group] = all || is_unfit(message, group) ? 1 : 0;
}

__global__ void __launch_bounds__(kMessageThreads)
    keep_message_kernel(const int64_t* message, int64_t* kept, int64_t* skips) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kMessageSize) kept[i] = message[i];
  if (i < kMostMessageGroups && message[kFoundInf] == 0) {
    skips[i] = is_unfit(message, i) ? skips[i] + 1 : 0;
  }
}

}  // namespace

cudaError_t pack_message(const HostNumbers& host, const DeviceNumbers& on_device, int64_t* message,
                         cudaStream_t stream) {
  pack_message_kernel<<<1, kMessageThreads, 0, stream>>>(host, on_device, message);
  return cudaGetLastError();
}

cudaError_t find_skipped_groups(const int64_t* message, int groups, float* skipped,
                                cudaStream_t stream) {
  if (groups == 0) return cudaSuccess;
  find_skipped_groups_kernel<<<1, groups, 0, stream>>>(message, skipped);
  return cudaGetLastError();
}

cudaError_t keep_message(const int64_t* message, int64_t* kept, int64_t* skips,
                         cudaStream_t stream) {
  keep_message_kernel<<<1, kMessageThreads, 0, stream>>>(message, kept, skips);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
