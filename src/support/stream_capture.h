// Whether the current stream is capturing a CUDA graph.
#pragma once

#include <c10/core/Device.h>

namespace torchium::detail {

// True while the current stream of `device` is captured in a CUDA graph. The host must then neither
// query events nor depend on device values. Always false in a build without CUDA.
bool is_capturing(c10::Device device);

}  // namespace torchium::detail
