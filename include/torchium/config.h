// What this build of Torchium was made with.
#pragma once

#include "torchium/export.h"

#include <string>

namespace torchium {

/// The version of the loaded library, for example "0.2.0+torch2.11.cu130". It can differ from the
/// macro TORCHIUM_VERSION of <torchium/version.h>, which is that of the headers.
TORCHIUM_API std::string version();

/// True if the CUDA kernels of Torchium are in this build.
TORCHIUM_API bool built_with_cuda();

/// Lines of "name: value": the versions of Torchium and torch (the one built against and the one
/// that runs), CUDA and its architectures, BLAS and LAPACK of torch, compiler and build type.
TORCHIUM_API std::string show_config();

}  // namespace torchium
