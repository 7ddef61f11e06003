#include "optim/natural_gradient/captured_batch.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {

using gradients::detail::Jacobian;

Jacobian CapturedBatch::jacobian(at::TensorList params) const {
  return given_rows.empty() ? Jacobian(params, calls, scale, loss_scale)
                            : Jacobian(params, given_rows);
}

at::Tensor CapturedBatch::coefficients(int64_t n, const at::TensorOptions& options) const {
  if (residuals.defined()) {
    const at::Tensor own = residuals.to(at::kDouble);
    return shared ? shared->gather(own) : own;
  }
  if (!is_of_gradient) {
    return {};
  }
  return shared ? shared->weights_of_mean_gradient(options)
                : at::ones({n}, options.dtype(at::kDouble));
}

}  // namespace torchium::optim::detail
