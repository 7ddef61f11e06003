// Moving averages of factors and Fisher blocks, by PyTorch operators.
#pragma once

#include "optim/core/found_inf_guard.h"

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace torchium::optim::detail {

struct FactorAverage {
  at::Tensor average;
  at::Tensor sum;
  double scale;
};

// k <- k + 1; average <- d average + (1 - d) scale sum with d = min(1 - 1/k, stat_decay)
void update_averages(std::initializer_list<FactorAverage> averages, at::Tensor updates,
                     double stat_decay, const FoundInfGuard& guard);

}  // namespace torchium::optim::detail
