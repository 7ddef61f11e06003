// What update_damping() of KFAC needs of a step.
#pragma once

#include "optim/core/found_inf_guard.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

struct KfacPrediction {
  // By how much the quadratic model lowers the loss; 0 for a skipped step. Waits for the device.
  double reduction() const;

  std::vector<at::Tensor> lrs;  // copies: a tensor may change later
  at::Tensor terms = {};        // of sum lr^2 V . d; undefined: none
  StepScalar nu = {};
};

}  // namespace torchium::optim::detail
