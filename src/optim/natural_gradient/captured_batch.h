// The sources of the rows of J in a step.
#pragma once

#include "gradients/capture/layer_call.h"
#include "gradients/jacobian/jacobian.h"
#include "optim/natural_gradient/sharing/call_lists.h"
#include "optim/natural_gradient/sharing/shared_rows.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torchium::optim::detail {

struct CapturedBatch {
  // Output gradients times scale / loss_scale are rows of J. For gradients of the mean loss of n
  // samples scale = n; loss_scale is the factor of a GradScaler.
  std::vector<gradients::detail::LayerCall> calls = {};
  double scale = 1.0;
  at::Tensor loss_scale = {};  // one number on the device, or undefined
  // Instead of calls: one [n, *shape] per parameter, and the residuals [n].
  std::vector<at::Tensor> given_rows = {};
  at::Tensor residuals = {};
  // Whether the mean of the rows is the gradient before it was changed.
  bool is_of_gradient = false;
  // Set if other ranks have rows of J too: those here are this rank's.
  std::shared_ptr<const SharedRows> shared = {};
  // The calls of all ranks, where the Gram matrix is computed from them.
  std::shared_ptr<const JointLists> lists = {};

  bool is_empty() const { return calls.empty() && given_rows.empty(); }
  // a [n] float64 with J^T a / n the gradient before it was changed, for the rows of all ranks;
  // undefined: unknown.
  at::Tensor coefficients(int64_t n, const at::TensorOptions& options) const;
  // The rows of this rank.
  gradients::detail::Jacobian jacobian(at::TensorList params) const;
};

}  // namespace torchium::optim::detail
