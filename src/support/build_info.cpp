#include "support/build_info.h"

#include <torchium/config.h>
#include <torchium/version.h>

#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include <sstream>

namespace torchium {
namespace {

// The value of "key=value" in torch's own description of its build, or "unknown".
std::string torch_setting(const std::string& description, const std::string& key) {
  const auto start = description.find(key + "=");
  if (start == std::string::npos) return "unknown";
  const auto value = start + key.size() + 1;
  return description.substr(value, description.find_first_of(",\n", value) - value);
}

// The version of the loaded torch, from its own build description.
std::string running_torch_version(const std::string& description) {
  const auto version = torch_setting(description, "TORCH_VERSION");
  return version == "unknown" ? std::string(TORCH_VERSION) : version;
}

}  // namespace

std::string version() { return TORCHIUM_VERSION; }

bool built_with_cuda() {
#ifdef TORCHIUM_WITH_CUDA
  return true;
#else
  return false;
#endif
}

const char* detail::cuda_architectures() { return TORCHIUM_CUDA_ARCHITECTURES; }

std::string show_config() {
  const std::string torch_description = at::show_config();
  std::ostringstream out;
  out << "torchium: " << version() << '\n'
      << "torch (built against): " << TORCH_VERSION << '\n'
      << "torch (running): " << running_torch_version(torch_description) << '\n'
      << "CUDA kernels: " << TORCHIUM_CUDA_DESCRIPTION << '\n'
      << "CUDA architectures: " << detail::cuda_architectures() << '\n'
      << "BLAS: " << torch_setting(torch_description, "BLAS_INFO") << '\n'
      << "LAPACK: " << torch_setting(torch_description, "LAPACK_INFO") << '\n'
      << "compiler: " << TORCHIUM_COMPILER << '\n'
      << "build type: " << TORCHIUM_BUILD_TYPE << '\n';
  return out.str();
}

}  // namespace torchium
