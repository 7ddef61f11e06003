#include "optim/capture/adaptive_damping.h"

#include <ATen/ATen.h>

#include <bit>
#include <cmath>
#include <limits>

namespace torchium::optim::detail {

std::pair<double, double> damping_update(const std::optional<double>& predicted, int64_t steps,
                                         const DampingLosses& losses) {
  constexpr double kDecay = 0.95;  // in each step
  TORCH_CHECK_VALUE(std::isfinite(losses.before), "loss_before must be finite, got ",
                    losses.before);
  TORCH_CHECK_VALUE(predicted && steps > 0,
                    "update_damping() compares the losses before and after a step; call it once "
                    "after step()");
  if (!(*predicted > 0.0)) {
    return {std::numeric_limits<double>::quiet_NaN(), 1.0};
  }
  const double decay = std::pow(kDecay, steps);
  const double reduction =
      losses.maximize ? losses.after - losses.before : losses.before - losses.after;
  const double ratio =
      std::isfinite(reduction) ? reduction / *predicted : -std::numeric_limits<double>::infinity();
  return {ratio, ratio > 0.75 ? decay : ratio < 0.25 ? 1.0 / decay : 1.0};
}

DampingLosses mean_over_ranks(const DampingLosses& own, const distributed::Communicator& ranks) {
  DampingLosses mean{0.0, 0.0, own.maximize};
  for (const auto& row :
       ranks.all_gather({std::bit_cast<int64_t>(own.before), std::bit_cast<int64_t>(own.after)})) {
    mean.before += std::bit_cast<double>(row[0]) / static_cast<double>(ranks.size());
    mean.after += std::bit_cast<double>(row[1]) / static_cast<double>(ranks.size());
  }
  return mean;
}

double common_learning_rate(const std::vector<at::Tensor>& lrs) {
  const double lr = lrs.front().item<double>();
  for (const at::Tensor& other : lrs) {
    TORCH_CHECK_VALUE(other.item<double>() == lr,
                      "update_damping() compares steps with one lr for all groups, got ", lr,
                      " and ", other.item<double>());
  }
  return lr;
}

}  // namespace torchium::optim::detail
