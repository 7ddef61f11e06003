#include "linalg/roots/root_schedule_table.h"

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
#include "cuda_kernels/inverse_root/minimax_schedule_table.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {
namespace {

using cuda_kernels::RootScheduleTable;

constexpr double kUnitRoundoff = std::numeric_limits<float>::epsilon() / 2;

cuda_kernels::LastStep in_float(const LastStep& step) {
  const auto [center, a, b, c, d, e, f, g] = step;
  return {static_cast<float>(center), static_cast<float>(a), static_cast<float>(b),
          static_cast<float>(c),      static_cast<float>(d), static_cast<float>(e),
          static_cast<float>(f),      static_cast<float>(g)};
}

std::unique_ptr<RootScheduleTable> make_root_schedule_table(int64_t p, int64_t lowest_level) {
  if (1 - lowest_level > RootScheduleTable::kMaxLevels) {
    return nullptr;
  }
  std::vector<std::shared_ptr<const LastStepSchedule>> schedules;
  std::vector<const std::vector<MinimaxStep>*> steps;
  size_t longest = 0;
  for (int64_t level = lowest_level; level <= 0; ++level) {
    schedules.push_back(last_step_schedule(p, std::exp2(level), kUnitRoundoff));
    steps.push_back(&schedules.back()->steps);
    longest = std::max(longest, steps.back()->size());
  }
  if (longest > RootScheduleTable::kMaxSteps) {
    return nullptr;
  }
  auto table = std::make_unique<RootScheduleTable>();
  fill_schedule_table(*table, lowest_level, steps, longest);
  for (size_t level = 0; level < schedules.size(); ++level) {
    table->last[level] = in_float(schedules[level]->last);
  }
  return table;
}

}  // namespace

const RootScheduleTable* root_schedule_table(int64_t p, int64_t lowest_level) {
  static std::mutex mutex;
  static std::map<std::pair<int64_t, int64_t>, std::unique_ptr<const RootScheduleTable>> tables;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = tables.try_emplace({p, lowest_level});
  if (is_new) {
    entry->second = make_root_schedule_table(p, lowest_level);
  }
  return entry->second.get();
}

#ifdef TORCHIUM_WITH_CUDA

DeviceSchedules schedules_of_levels(const at::Tensor& levels, int64_t lowest_level, int64_t root,
                                    double unit_roundoff) {
  torchium::detail::check_device_code(levels.device());
  std::vector<std::shared_ptr<const std::vector<MinimaxStep>>> schedules;
  std::vector<const std::vector<MinimaxStep>*> of_levels;
  size_t steps = 0;
  for (int64_t level = lowest_level; level <= 0; ++level) {
    schedules.push_back(minimax_schedule(root, std::exp2(level), unit_roundoff));
    of_levels.push_back(schedules.back().get());
    steps = std::max(steps, of_levels.back()->size());
  }
  const int64_t matrices = levels.size(0);
  DeviceSchedules result{
      at::empty({static_cast<int64_t>(steps), matrices, 3}, levels.options().dtype(at::kDouble)),
      at::empty({matrices}, levels.options())};
  const c10::cuda::CUDAGuard device_guard(levels.device());
  const size_t most = std::min<size_t>(cuda_kernels::MinimaxScheduleTable::kMaxLevels,
                                       cuda_kernels::MinimaxScheduleTable::kCapacity / steps);
  const auto table = std::make_unique<cuda_kernels::MinimaxScheduleTable>();
  for (size_t begin = 0; begin < of_levels.size(); begin += most) {
    const auto first = of_levels.begin() + static_cast<ptrdiff_t>(begin);
    const size_t count = std::min(most, of_levels.size() - begin);
    fill_schedule_table(*table, lowest_level + static_cast<int64_t>(begin),
                        {first, first + static_cast<ptrdiff_t>(count)}, steps);
    cuda_kernels::select_schedules(*table, levels.const_data_ptr<int64_t>(), matrices,
                                   result.coefficients.mutable_data_ptr<double>(),
                                   result.lengths.mutable_data_ptr<int64_t>(),
                                   c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return result;
}

#else

DeviceSchedules schedules_of_levels(const at::Tensor& levels, int64_t lowest_level, int64_t root,
                                    double unit_roundoff) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
