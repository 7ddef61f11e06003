// Whether this build's CUDA kernels run on a device.
#pragma once

#include "torchium/export.h"

#include <c10/core/Device.h>

#include <string>

namespace torchium::detail {

// Why a library with these architectures (build_info.h) has no code for a GPU, `device` in
// messages, of compute capability major.minor, with the command that builds it; empty if it has
// code. Machine code runs on GPUs of its major version from its minor version on, PTX on all later
// ones; "90a", also its PTX, only on 9.0, and "100f" only on its major version.
TORCHIUM_API std::string missing_device_code(const std::string& architectures,
                                             const std::string& device, int major, int minor);

// Raises c10::Error where a kernel would fail with "no kernel image". Call it before the first
// launch on a device; it checks each device once.
void check_device_code(c10::Device device);

// For tests, in CUDA builds: check_device_code() checks all devices again, as in a library with
// these architectures; empty: its own.
TORCHIUM_API void assume_architectures(std::string architectures);

}  // namespace torchium::detail
