// What a step tells the host, in one small tensor on the parameters' device.
//
// A step never reads it: on a GPU it is copied to pinned memory and looked at by a later step.
#pragma once

#include "cuda_kernels/optimizer_step/step_rule.h"

#include <cstdint>

namespace torchium::optim::detail {

using enum cuda_kernels::StepStatusEntry;

// Skipped steps in a row after which the optimizer raises.
constexpr int64_t kMaxConsecutiveSkips = 3;

}  // namespace torchium::optim::detail
