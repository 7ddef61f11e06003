// J as a step needs it: the rows of this process, or those of all ranks that share the step.
#pragma once

#include "gradients/jacobian/jacobian.h"
#include "optim/natural_gradient/captured_batch.h"
#include "optim/natural_gradient/sharing/shared_rows.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torchium::optim::detail {

// With ranks all of them must call the same methods, with the same arguments, and get the same
// results, bit for bit. Names are those of Jacobian.
class SharedJacobian {
 public:
  SharedJacobian(at::TensorList params, const CapturedBatch& batch);

  int64_t samples() const { return shared_ ? shared_->total() : local_.samples(); }
  void keep_patches(int64_t bytes) { local_.keep_patches(bytes); }

  // With ranks the rows of each layer travel to the one that computes its part of the sum; at most
  // `max_workspace_bytes` reach a rank at a time, or one layer.
  at::Tensor gram(at::ArrayRef<double> weights, int64_t max_workspace_bytes) const;
  std::vector<at::Tensor> transpose_product(const at::Tensor& w,
                                            at::ArrayRef<double> scales = {}) const;
  at::Tensor product(at::TensorList x, at::ArrayRef<double> scales = {}) const;

  // Whether `own` is true on any rank, for decisions of the host on a CPU: results that each rank
  // has computed for itself may differ in their last bits. On a GPU the host decides nothing.
  bool any(bool own) const { return shared_ && is_cpu_ ? shared_->any(own) : own; }
  // The same for the largest number.
  int64_t most(int64_t own) const { return shared_ && is_cpu_ ? shared_->most(own) : own; }
  // In place: the same bits of such results on all ranks.
  void equalize_(const std::vector<at::Tensor>& results) const;

 private:
  std::vector<at::Tensor> params_;
  const CapturedBatch& batch_;
  gradients::detail::Jacobian local_;
  std::shared_ptr<const SharedRows> shared_;  // null: this process alone
  bool is_cpu_;
};

}  // namespace torchium::optim::detail
