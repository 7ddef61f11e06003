#include "linalg/device_schedules.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/minimax_ladder.h"
#include "linalg/minimax.h"
#include "linalg/root_ladder.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA

using cuda_kernels::MinimaxLadder;

DeviceSchedules schedules_of_rungs(const at::Tensor& rungs, int64_t lowest_rung, int64_t root,
                                   double unit_roundoff) {
  torchium::detail::check_device_code(rungs.device());
  std::vector<std::shared_ptr<const std::vector<MinimaxStep>>> schedules;
  std::vector<const std::vector<MinimaxStep>*> of_rungs;
  size_t steps = 0;
  for (int64_t rung = lowest_rung; rung <= 0; ++rung) {
    schedules.push_back(minimax_schedule(root, std::exp2(rung), unit_roundoff));
    of_rungs.push_back(schedules.back().get());
    steps = std::max(steps, of_rungs.back()->size());
  }
  const int64_t matrices = rungs.size(0);
  DeviceSchedules result{
      at::empty({static_cast<int64_t>(steps), matrices, 3}, rungs.options().dtype(at::kDouble)),
      at::empty({matrices}, rungs.options())};
  const c10::cuda::CUDAGuard guard(rungs.device());
  const size_t most = std::min<size_t>(MinimaxLadder::kMaxRungs, MinimaxLadder::kCapacity / steps);
  const auto ladder = std::make_unique<MinimaxLadder>();
  for (size_t begin = 0; begin < of_rungs.size(); begin += most) {
    const auto first = of_rungs.begin() + static_cast<ptrdiff_t>(begin);
    const size_t count = std::min(most, of_rungs.size() - begin);
    fill_ladder(*ladder, lowest_rung + static_cast<int64_t>(begin),
                {first, first + static_cast<ptrdiff_t>(count)}, steps);
    cuda_kernels::select_schedules(*ladder, rungs.const_data_ptr<int64_t>(), matrices,
                                   result.coefficients.mutable_data_ptr<double>(),
                                   result.lengths.mutable_data_ptr<int64_t>(),
                                   c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return result;
}

#else

DeviceSchedules schedules_of_rungs(const at::Tensor& rungs, int64_t lowest_rung, int64_t root,
                                   double unit_roundoff) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
