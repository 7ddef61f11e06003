#include "support/device_code.h"

#include "support/build_info.h"

#include <c10/util/Exception.h>

#include <regex>
#include <sstream>
#include <utility>

#ifdef TORCHIUM_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>

#include <array>
#include <atomic>
#endif

namespace torchium::detail {
namespace {

// Whether one of CMake's architectures, such as "80-real", has code for the device. Unknown ones,
// such as "native", are assumed to.
bool has_code(const std::string& architecture, int major, int minor) {
  static const std::regex kPattern("([0-9]+)([0-9])([af]?)(-real|-virtual)?");
  std::smatch match;
  if (!std::regex_match(architecture, match, kPattern)) {
    return true;
  }
  const int its_major = std::stoi(match[1]), its_minor = std::stoi(match[2]);
  const std::string suffix = match[3];
  if (suffix == "a") {
    return major == its_major && minor == its_minor;
  }
  const bool is_ptx_for_later = suffix.empty() && match[4] != "-real" && major > its_major;
  return is_ptx_for_later || (major == its_major && minor >= its_minor);
}

#ifdef TORCHIUM_WITH_CUDA
std::array<std::atomic<bool>, C10_COMPILE_TIME_MAX_GPUS> fits{};  // devices that were checked
std::string assumed_architectures;
#endif

}  // namespace

std::string missing_device_code(const std::string& architectures, const std::string& device,
                                int major, int minor) {
  std::istringstream list(architectures);
  for (std::string architecture; list >> architecture;) {
    if (has_code(architecture, major, minor)) {
      return "";
    }
  }
  const std::string needed = c10::str(major, ".", minor, major == 9 && minor == 0 ? "a" : "");
  return c10::str("the CUDA kernels of torchium were built for the GPU architectures ",
                  architectures, ", which do not run on ", device, " of compute capability ", major,
                  ".", minor, ". Build torchium again, in its sources: make install ",
                  "CMAKE_ARGS='-DTORCHIUM_ARCHS=\"", needed,
                  "\"', where further architectures follow after semicolons");
}

#ifdef TORCHIUM_WITH_CUDA
void check_device_code(c10::Device device) {
  const c10::DeviceIndex index = device.has_index() ? device.index() : at::cuda::current_device();
  if (fits[index].load(std::memory_order_relaxed)) {
    return;
  }
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(index);
  const std::string name = c10::str("cuda:", static_cast<int>(index), " (", properties->name, ")");
  const std::string missing = missing_device_code(
      assumed_architectures.empty() ? cuda_architectures() : assumed_architectures, name,
      properties->major, properties->minor);
  TORCH_CHECK(missing.empty(), missing);
  fits[index].store(true, std::memory_order_relaxed);
}

void assume_architectures(std::string architectures) {
  assumed_architectures = std::move(architectures);
  for (auto& each : fits) {
    each.store(false, std::memory_order_relaxed);
  }
}
#else
void check_device_code(c10::Device device) {}
#endif

}  // namespace torchium::detail
