#pragma once

#include "gradients/jacobian/jacobian_block.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>

namespace torchium::gradients::detail {

// [n, *shape] -> [n, elements], also for the shape [].
inline at::Tensor flat_rows(const at::Tensor& R) { return R.unsqueeze(-1).flatten(1); }

// Explicit rows: for biases, norm weights, and weights whose calls have no common factors.
class DenseBlock : public JacobianBlock {
 public:
  // rows: [n, *shape] in the state dtype.
  explicit DenseBlock(at::Tensor rows) : rows_(std::move(rows)) {}
  // Formed when they are first needed.
  explicit DenseBlock(std::function<at::Tensor()> form) : form_(std::move(form)) {}

  void add_gram_(at::Tensor& K, double weight) const override;
  Added add_gram_to(GramSums& sums, double weight, double bias_weight) const override;
  at::Tensor transpose_product(const at::Tensor& w) const override;
  at::Tensor product(const at::Tensor& x) const override;
  void add_squared_norms_(at::Tensor& squares, int64_t max_workspace_bytes) const override;
  Added add_norms_to(NormSums& sums, bool has_bias, int64_t max_workspace_bytes) const override;
  at::Tensor weighted_rows(const at::Tensor& w, int64_t max_workspace_bytes) const override;

 private:
  const at::Tensor& rows() const {
    if (!rows_.defined()) {
      rows_ = form_();
    }
    return rows_;
  }

  mutable at::Tensor rows_;
  std::function<at::Tensor()> form_;
};

}  // namespace torchium::gradients::detail
