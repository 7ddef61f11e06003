#include "linalg/device_schedules.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/minimax_ladder.h"
#include "linalg/minimax_schedules.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA

using cuda_kernels::MinimaxLadder;

bool has_device_schedules(const at::Tensor& S) { return S.is_cuda(); }

DeviceSchedules schedules_of_rungs(const at::Tensor& rungs, int64_t lowest_rung, int64_t root,
                                   double unit_roundoff) {
  torchium::detail::check_device_code(rungs.device());
  const MinimaxSchedules schedules(root, lowest_rung, unit_roundoff);
  const auto steps = static_cast<int>(schedules.longest());
  const int64_t matrices = rungs.size(0);
  DeviceSchedules result{at::empty({steps, matrices, 3}, rungs.options().dtype(at::kDouble)),
                         at::empty({matrices}, rungs.options())};
  const c10::cuda::CUDAGuard guard(rungs.device());
  const int64_t most = std::min(MinimaxLadder::kMaxRungs, MinimaxLadder::kCapacity / steps);
  for (int64_t begin = lowest_rung; begin <= 0; begin += most) {
    const auto ladder = schedules.ladder(begin, std::min<int64_t>(1, begin + most));
    cuda_kernels::select_schedules(*ladder, rungs.const_data_ptr<int64_t>(), matrices,
                                   result.coefficients.mutable_data_ptr<double>(),
                                   result.lengths.mutable_data_ptr<int64_t>(),
                                   c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return result;
}

#else

bool has_device_schedules(const at::Tensor& S) { return false; }

DeviceSchedules schedules_of_rungs(const at::Tensor& rungs, int64_t lowest_rung, int64_t root,
                                   double unit_roundoff) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
