#include "linalg/root_ladder.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/minimax_ladder.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {
namespace {

using cuda_kernels::RootLadder;

constexpr double kUnitRoundoff = std::numeric_limits<float>::epsilon() / 2;

cuda_kernels::LastStep in_float(const LastStep& step) {
  const auto [center, a, b, c, d, e, f, g] = step;
  return {static_cast<float>(center), static_cast<float>(a), static_cast<float>(b),
          static_cast<float>(c),      static_cast<float>(d), static_cast<float>(e),
          static_cast<float>(f),      static_cast<float>(g)};
}

std::unique_ptr<RootLadder> make_root_ladder(int64_t p, int64_t lowest_rung) {
  if (1 - lowest_rung > RootLadder::kMaxRungs) {
    return nullptr;
  }
  std::vector<std::shared_ptr<const LastStepSchedule>> schedules;
  std::vector<const std::vector<MinimaxStep>*> steps;
  size_t longest = 0;
  for (int64_t rung = lowest_rung; rung <= 0; ++rung) {
    schedules.push_back(last_step_schedule(p, std::exp2(rung), kUnitRoundoff));
    steps.push_back(&schedules.back()->steps);
    longest = std::max(longest, steps.back()->size());
  }
  if (longest > RootLadder::kMaxSteps) {
    return nullptr;
  }
  auto ladder = std::make_unique<RootLadder>();
  fill_ladder(*ladder, lowest_rung, steps, longest);
  for (size_t rung = 0; rung < schedules.size(); ++rung) {
    ladder->last[rung] = in_float(schedules[rung]->last);
  }
  return ladder;
}

}  // namespace

const RootLadder* root_ladder(int64_t p, int64_t lowest_rung) {
  static std::mutex mutex;
  static std::map<std::pair<int64_t, int64_t>, std::unique_ptr<const RootLadder>> ladders;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = ladders.try_emplace({p, lowest_rung});
  if (is_new) {
    entry->second = make_root_ladder(p, lowest_rung);
  }
  return entry->second.get();
}

#ifdef TORCHIUM_WITH_CUDA

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
  const size_t most = std::min<size_t>(cuda_kernels::MinimaxLadder::kMaxRungs,
                                       cuda_kernels::MinimaxLadder::kCapacity / steps);
  const auto ladder = std::make_unique<cuda_kernels::MinimaxLadder>();
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
