// What this build was made for.
#pragma once

namespace torchium::detail {

// The GPU architectures of the CUDA kernels as CMake spells them, separated by spaces
// ("80-real 90a-real"); "none" in a build without CUDA.
const char* cuda_architectures();

}  // namespace torchium::detail
