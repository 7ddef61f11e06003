// The schedules of all intervals [2^rung, 1], as the argument of a kernel. CUDA builds only.
#pragma once

#include "cuda_kernels/minimax_ladder.h"
#include "linalg/minimax.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

namespace torchium::linalg::detail {

class MinimaxSchedules {
 public:
  // Rungs lowest_rung to 0.
  MinimaxSchedules(int64_t root, int64_t lowest_rung, double unit_roundoff)
      : lowest_rung_(lowest_rung) {
    for (int64_t rung = lowest_rung; rung <= 0; ++rung) {
      schedules_.push_back(minimax_schedule(root, std::exp2(rung), unit_roundoff));
      longest_ = std::max(longest_, schedules_.back()->size());
    }
  }

  size_t longest() const { return longest_; }  // steps

  // The rungs [begin, end).
  std::unique_ptr<cuda_kernels::MinimaxLadder> ladder(int64_t begin, int64_t end) const {
    auto result = std::make_unique<cuda_kernels::MinimaxLadder>();
    result->lowest_rung = static_cast<int>(begin);
    result->rungs = static_cast<int>(end - begin);
    result->steps = static_cast<int>(longest_);
    double* out = result->coefficients;
    for (int64_t rung = begin; rung < end; ++rung) {
      const std::vector<MinimaxStep>& schedule = *schedules_[rung - lowest_rung_];
      result->lengths[rung - begin] = static_cast<int>(schedule.size());
      for (size_t k = 0; k < longest_; ++k) {
        const MinimaxStep step = k < schedule.size() ? schedule[k] : MinimaxStep{1, 0, 0};
        *out++ = step.a;
        *out++ = step.b;
        *out++ = step.c;
      }
    }
    return result;
  }

 private:
  int64_t lowest_rung_;
  size_t longest_ = 0;
  std::vector<std::shared_ptr<const std::vector<MinimaxStep>>> schedules_;
};

}  // namespace torchium::linalg::detail
