// Schedules of the minimax coupled iteration chosen on a CUDA device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

struct DeviceSchedules {
  at::Tensor coefficients;  // [steps, N, 3] float64: a, b, c of each step; 1, 0, 0 behind the last
  at::Tensor lengths;       // [N] int64
};

// The schedules for the intervals [2^rungs[i], 1]. rungs: [N] int64 in [lowest_rung, 0]. Nothing is
// read on the host.
DeviceSchedules schedules_of_rungs(const at::Tensor& rungs, int64_t lowest_rung, int64_t root,
                                   double unit_roundoff);

}  // namespace torchium::linalg::detail
