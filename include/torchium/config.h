// Build information.
#pragma once

#include "torchium/export.h"

#include <string>

namespace torchium {

/// The version of the loaded library, for example "0.2.0+torch2.11.cu130". It can differ from the
/// version of the headers, TORCHIUM_VERSION in <torchium/version.h>.
TORCHIUM_API std::string version();

/// True if this build contains Torchium's CUDA kernels.
TORCHIUM_API bool built_with_cuda();

/// Lines of "name: value": versions of Torchium and torch (at build time and at run time), CUDA and
/// its architectures, torch's BLAS and LAPACK, compiler and build type.
TORCHIUM_API std::string show_config();

}  // namespace torchium
