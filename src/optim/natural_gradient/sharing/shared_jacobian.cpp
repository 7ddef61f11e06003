#include "optim/natural_gradient/sharing/shared_jacobian.h"

#include "optim/natural_gradient/sharing/shared_gram.h"

namespace torchium::optim::detail {

SharedJacobian::SharedJacobian(at::TensorList params, const CapturedBatch& batch)
    : params_(params.vec()),
      batch_(batch),
      local_(batch.jacobian(params)),
      shared_(batch.shared),
      is_cpu_(params[0].is_cpu()) {}

at::Tensor SharedJacobian::gram(at::ArrayRef<double> weights, int64_t max_workspace_bytes) const {
  return shared_ ? shared_gram(params_, batch_, weights, max_workspace_bytes)
                 : local_.gram(weights);
}

// sum over the ranks of J_r^T w_r
std::vector<at::Tensor> SharedJacobian::transpose_product(const at::Tensor& w,
                                                          at::ArrayRef<double> scales) const {
  return shared_ ? shared_->sum(local_.transpose_product(shared_->own(w), scales))
                 : local_.transpose_product(w, scales);
}

at::Tensor SharedJacobian::product(at::TensorList x, at::ArrayRef<double> scales) const {
  const at::Tensor own = local_.product(x, scales);
  return shared_ ? shared_->gather(own) : own;
}

void SharedJacobian::equalize_(const std::vector<at::Tensor>& results) const {
  if (shared_) {
    shared_->equalize_(results);
  }
}

}  // namespace torchium::optim::detail
