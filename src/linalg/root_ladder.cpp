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

}  // namespace torchium::linalg::detail
