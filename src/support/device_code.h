// Whether the CUDA kernels of this build run on a device.
#pragma once

#include "torchium/export.h"

#include <c10/core/Device.h>

#include <string>

namespace torchium::detail {

// Why a library with these architectures (build_info.h) has no code for a GPU, `device` in
// messages, of compute capability major.minor, with the command that builds it; empty: it has.
// Machine code runs on GPUs of its major version from its minor version on, PTX on all later ones;
// "90a", also its PTX, on 9.0 alone and "100f" on its major version alone.
TORCHIUM_API std::string missing_device_code(const std::string& architectures,
                                             const std::string& device, int major, int minor);

// Raises c10::Error where a kernel would fail with "no kernel image". For every place that launches
// the first kernel; looks at a device once.
void check_device_code(c10::Device device);

}  // namespace torchium::detail
