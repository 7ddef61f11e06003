// Schedules of the iterations for inverse p-th roots on a GPU: as the argument of a kernel, and
// chosen there.
#pragma once

#include "cuda_kernels/root_ladder.h"
#include "linalg/minimax.h"
#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchium::linalg::detail {

// The schedules for the p-th root, rungs lowest_rung to 0; null if there are more rungs or steps
// than the kernels support. Kept for the life of the process. Thread-safe.
TORCHIUM_API const cuda_kernels::RootLadder* root_ladder(int64_t p, int64_t lowest_rung);

// Writes the quadratic steps of the rungs from lowest_rung on; `longest` is the most of them.
template <typename T, int max_rungs, int max_steps>
void fill_ladder(cuda_kernels::ScheduleLadder<T, max_rungs, max_steps>& ladder, int64_t lowest_rung,
                 const std::vector<const std::vector<MinimaxStep>*>& rungs, size_t longest) {
  ladder.lowest_rung = static_cast<int>(lowest_rung);
  ladder.rungs = static_cast<int>(rungs.size());
  ladder.steps = static_cast<int>(longest);
  T* out = ladder.coefficients;
  for (size_t rung = 0; rung < rungs.size(); ++rung) {
    const std::vector<MinimaxStep>& steps = *rungs[rung];
    ladder.lengths[rung] = static_cast<int>(steps.size());
    for (size_t k = 0; k < longest; ++k) {
      const auto [a, b, c] = k < steps.size() ? steps[k] : MinimaxStep{1, 0, 0};
      for (const double coefficient : {a, b, c}) {
        *out++ = static_cast<T>(coefficient);
      }
    }
  }
}

struct DeviceSchedules {
  at::Tensor coefficients;  // [steps, N, 3] float64: a, b, c of each step; 1, 0, 0 behind the last
  at::Tensor lengths;       // [N] int64
};

// The schedules for the intervals [2^rungs[i], 1]. rungs: [N] int64 in [lowest_rung, 0]. Nothing is
// read on the host.
DeviceSchedules schedules_of_rungs(const at::Tensor& rungs, int64_t lowest_rung, int64_t root,
                                   double unit_roundoff);

}  // namespace torchium::linalg::detail
