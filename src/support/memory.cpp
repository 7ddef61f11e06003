#include "support/arena.h"
#include <torchium/memory.h>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <limits>
#include <string>
#include <unistd.h>

#ifdef TORCHIUM_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace torchium {
namespace {

constexpr int64_t kNoLimit = -1;
std::atomic<int64_t> limit_of_workspaces = kNoLimit;

constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();

// The integer in the first line of a file, or kUnknown ("max", no such file).
int64_t read_bytes(const char* path) {
  std::ifstream file(path);
  int64_t bytes = 0;
  return file >> bytes ? bytes : kUnknown;
}

int64_t available_host_memory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  int64_t kilobytes = 0;
  for (std::string unit; meminfo >> key >> kilobytes && std::getline(meminfo, unit);) {
    if (key == "MemAvailable:") return kilobytes * 1024;
  }
  return static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

int64_t host_memory() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

// The remaining memory of the control group (version 2) that is this process's root.
int64_t control_group_memory() {
  const auto limit = read_bytes("/sys/fs/cgroup/memory.max");
  const auto used = read_bytes("/sys/fs/cgroup/memory.current");
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  return std::max<int64_t>(0, limit - used);
}

}  // namespace

namespace {

CudaMemoryInfo checked_memory_info(const char* function, std::optional<c10::Device> device) {
  TORCH_CHECK_VALUE(!device || device->is_cpu() || device->is_cuda(), function, ": device is ",
                    *device, "; it must be a CUDA device or the CPU");
  if (!at::hasCUDA() || (device && device->is_cpu())) return {};
  const auto count = at::accelerator::deviceCount();
  const auto index =
      device && device->has_index() ? device->index() : at::accelerator::getDeviceIndex();
  TORCH_CHECK_VALUE(index < count, function, ": device is cuda:", static_cast<int>(index),
                    "; there are ", static_cast<int>(count), " CUDA devices");
  at::globalContext().lazyInitDevice(c10::kCUDA);
  auto* allocator = at::getDeviceAllocator(c10::kCUDA);
  const auto [free, total] = allocator->getMemoryInfo(index);
  const auto stats = allocator->getDeviceStats(index);
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return {static_cast<int64_t>(total), static_cast<int64_t>(free),
          stats.allocated_bytes[all].current, stats.reserved_bytes[all].current, true};
}

// What torch.cuda.set_per_process_memory_fraction() lets this process reserve.
int64_t allowed_memory(c10::Device device, const CudaMemoryInfo& info) {
#ifdef TORCHIUM_WITH_CUDA
  if (info.available) {
    const double fraction = c10::cuda::CUDACachingAllocator::getMemoryFraction(
        device.has_index() ? device.index() : at::accelerator::getDeviceIndex());
    return static_cast<int64_t>(fraction * static_cast<double>(info.total_memory));
  }
#endif
  return info.total_memory;
}

}  // namespace

CudaMemoryInfo cuda_memory_info(std::optional<c10::Device> device) {
  return checked_memory_info("cuda_memory_info", device);
}

int64_t free_memory(c10::Device device) {
  if (device.is_cuda()) {
    const auto info = cuda_memory_info(device);
    const int64_t of_device = info.free_memory + info.cached_memory;
    return std::min(of_device, allowed_memory(device, info)) - info.allocated_memory;
  }
  return std::min(available_host_memory(), control_group_memory());
}

MemoryInfo memory_info(std::optional<c10::Device> device) {
  const c10::Device chosen = device.value_or(
      at::hasCUDA() && at::accelerator::deviceCount() > 0 ? c10::Device(c10::kCUDA) : c10::kCPU);
  const auto of_cuda = checked_memory_info("memory_info", chosen);
  TORCH_CHECK_VALUE(chosen.is_cpu() || of_cuda.available, "memory_info: device is ", chosen,
                    "; there is no CUDA device");
  c10::Device place = chosen;
  MemoryInfo info{.total = of_cuda.total_memory,
                  .allocated = of_cuda.allocated_memory,
                  .cached = of_cuda.cached_memory,
                  .workspace_limit = workspace_limit().value_or(kNoLimit)};
  if (chosen.is_cpu()) {
    info.total = std::min(host_memory(), read_bytes("/sys/fs/cgroup/memory.max"));
  } else if (!chosen.has_index()) {
    place.set_index(at::accelerator::getDeviceIndex());
  }
  const auto arena = detail::arena_bytes(place);
  info.available = free_memory(place);
  info.arena = arena.held;
  info.arena_in_use = arena.in_use;
  return info;
}

void set_workspace_limit(std::optional<int64_t> bytes) {
  TORCH_CHECK_VALUE(bytes.value_or(0) >= 0, "set_workspace_limit: bytes is ", bytes.value_or(0),
                    "; it must not be negative");
  limit_of_workspaces = bytes.value_or(kNoLimit);
}

std::optional<int64_t> workspace_limit() {
  const int64_t limit = limit_of_workspaces;
  return limit == kNoLimit ? std::nullopt : std::optional<int64_t>(limit);
}

}  // namespace torchium
