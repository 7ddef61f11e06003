// The status of a step: one small tensor on the parameters' device, for the host.
//
// A step never reads it. On a GPU it is copied to pinned memory, and a later step reads the copy.
#pragma once

#include "cuda_kernels/optimizer_step/step_rule.h"

#include <cstdint>

namespace torchium::optim::detail {

using enum cuda_kernels::StepStatusEntry;

// Skipped steps in a row after which the optimizer raises.
constexpr int64_t kMaxConsecutiveSkips = 3;

}  // namespace torchium::optim::detail
