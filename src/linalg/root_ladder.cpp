#include "linalg/root_ladder.h"

#include "linalg/minimax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

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
  size_t longest = 0;
  for (int64_t rung = lowest_rung; rung <= 0; ++rung) {
    schedules.push_back(last_step_schedule(p, std::exp2(rung), kUnitRoundoff));
    longest = std::max(longest, schedules.back()->steps.size());
  }
  if (longest > RootLadder::kMaxSteps) {
    return nullptr;
  }
  auto ladder = std::make_unique<RootLadder>();
  ladder->lowest_rung = static_cast<int>(lowest_rung);
  ladder->rungs = static_cast<int>(schedules.size());
  ladder->steps = static_cast<int>(longest);
  float* out = ladder->coefficients;
  for (size_t rung = 0; rung < schedules.size(); ++rung) {
    const std::vector<MinimaxStep>& steps = schedules[rung]->steps;
    ladder->lengths[rung] = static_cast<int>(steps.size());
    for (size_t k = 0; k < longest; ++k) {
      const auto [a, b, c] = k < steps.size() ? steps[k] : MinimaxStep{1, 0, 0};
      *out++ = static_cast<float>(a);
      *out++ = static_cast<float>(b);
      *out++ = static_cast<float>(c);
    }
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

}  // namespace torchium::linalg::detail
