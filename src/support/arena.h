// Memory that short-lived tensors take in turn: see efficient_tensor_creation in
// torchium/memory.h.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace torchium::detail {

struct ArenaBytes {
  int64_t held = 0;    // of all blocks of a device
  int64_t in_use = 0;  // of that, in live tensors
};

ArenaBytes arena_bytes(c10::Device device);

}  // namespace torchium::detail
