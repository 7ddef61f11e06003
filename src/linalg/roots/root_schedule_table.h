// Schedules of the iterations for inverse p-th roots on a GPU, as a kernel argument and selected on
// the device.
#pragma once

#include "cuda_kernels/inverse_root/root_schedule_table.h"
#include "linalg/roots/minimax.h"
#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchium::linalg::detail {

// The schedules for the p-th root, levels lowest_level to 0; null if there are more levels or steps
// than the kernels support. Kept for the life of the process. Thread-safe.
TORCHIUM_API const cuda_kernels::RootScheduleTable* root_schedule_table(int64_t p,
                                                                        int64_t lowest_level);

// Writes the quadratic steps of the levels from lowest_level on; `longest` is the largest number of
// steps.
template <typename T, int max_levels, int max_steps>
void fill_schedule_table(cuda_kernels::ScheduleTable<T, max_levels, max_steps>& schedules,
                         int64_t lowest_level,
                         const std::vector<const std::vector<MinimaxStep>*>& levels,
                         size_t longest) {
  schedules.lowest_level = static_cast<int>(lowest_level);
  schedules.levels = static_cast<int>(levels.size());
  schedules.steps = static_cast<int>(longest);
  T* out = schedules.coefficients;
  for (size_t level = 0; level < levels.size(); ++level) {
    const std::vector<MinimaxStep>& steps = *levels[level];
    schedules.lengths[level] = static_cast<int>(steps.size());
    for (size_t k = 0; k < longest; ++k) {
      const auto [a, b, c] = k < steps.size() ? steps[k] : MinimaxStep{1, 0, 0};
      for (const double coefficient : {a, b, c}) {
        *out++ = static_cast<T>(coefficient);
      }
    }
  }
}

struct DeviceSchedules {
  at::Tensor coefficients;  // [steps, N, 3] float64: a, b, c of each step; 1, 0, 0 after the last
  at::Tensor lengths;       // [N] int64
};

// The schedules for the intervals [2^levels[i], 1]. levels: [N] int64 in [lowest_level, 0]. The
// host reads nothing.
DeviceSchedules schedules_of_levels(const at::Tensor& levels, int64_t lowest_level, int64_t root,
                                    double unit_roundoff);

}  // namespace torchium::linalg::detail
