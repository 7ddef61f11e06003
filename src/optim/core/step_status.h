// What a step tells the host, in one small tensor on the parameters' device.
//
// A step never reads it: on a GPU it is copied to pinned memory and looked at by a later step.
#pragma once

#include <cstdint>

namespace torchium::optim::detail {

// Entries of the int64 tensor `status` [kStatusSize].
enum StepStatusEntry : int64_t {
  kConsecutiveSkips = 0,         // steps in a row skipped by a gradient not finite or too large
  kTotalSkips = 1,               // all skipped steps
  kNonFiniteParameter = 2,       // index (in the step's list) of the first such gradient, else -1
  kConsecutiveRootFailures = 3,  // largest count over all matrices of the group
  kFailedParameter = 4,          // index (in the step's list) of that matrix' parameter, else -1
  kStatusSize = 5,
};

// Skipped steps in a row after which the optimizer raises.
constexpr int64_t kMaxConsecutiveSkips = 3;

}  // namespace torchium::optim::detail
