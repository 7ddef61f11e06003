// Schedules of the float32 iteration on a GPU, as the argument of a kernel.
#pragma once

#include "cuda_kernels/root_ladder.h"
#include <torchium/export.h>

#include <cstdint>

namespace torchium::linalg::detail {

// The schedules for the p-th root, rungs lowest_rung to 0; null if there are more rungs or steps
// than the kernels support. Kept for the life of the process. Thread-safe.
TORCHIUM_API const cuda_kernels::RootLadder* root_ladder(int64_t p, int64_t lowest_rung);

}  // namespace torchium::linalg::detail
