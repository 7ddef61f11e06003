// The damping by the rule of Levenberg and Marquardt (Martens and Grosse 2015, section 6.5).
#pragma once

#include "distributed/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Arguments of update_damping() of K-FAC and natural gradient.
struct DampingLosses {
  double before;
  double after;
  bool maximize;
};

// The means of the losses that the ranks give. All ranks must call this.
DampingLosses mean_over_ranks(const DampingLosses& own, const distributed::Communicator& ranks);

// The ratio of the reduction of the loss to the one that the quadratic model predicts, and the
// factor for the damping after `steps` steps: 0.95^steps for a ratio above 3/4, its inverse below
// 1/4. predicted: none without a step; not above 0: the ratio is NaN and the factor 1. ValueError
// for a loss before that is not finite, and without a step.
std::pair<double, double> damping_update(const std::optional<double>& predicted, int64_t steps,
                                         const DampingLosses& losses);

// The number that all of these are; ValueError if they differ. Waits for the device.
double common_learning_rate(const std::vector<at::Tensor>& lrs);

}  // namespace torchium::optim::detail
