// Build information.
#pragma once

namespace torchium::detail {

// The GPU architectures of the CUDA kernels in CMake's spelling, separated by spaces ("80-real
// 90a-real"); "none" in a build without CUDA.
const char* cuda_architectures();

}  // namespace torchium::detail
