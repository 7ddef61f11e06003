// Reports the failed roots of a step to the host through `status` (step_status.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

struct RootFailures {
  at::Tensor counts;  // int32, any shape: consecutive failures of some matrices of one parameter
  int64_t param;      // its index in the step's list
};

// Writes the largest count, and its parameter, to `status`.
void record_root_failures(const std::vector<RootFailures>& all, at::Tensor& status);

}  // namespace torchium::optim::detail
