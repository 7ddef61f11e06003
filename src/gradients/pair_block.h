#pragma once

#include "gradients/jacobian_block.h"
#include "gradients/patches.h"

#include <vector>

namespace torchium::gradients::detail {

// A linear or convolution weight: row i is, for each group, sum_t G[i, group, t] A[i, group, t]^T.
class PairBlock : public JacobianBlock {
 public:
  // `shape` is that of the weight: [groups * fan_out, fan_in...].
  PairBlock(Positions positions, at::IntArrayRef shape);

  void add_gram_(at::Tensor& K, double weight) const override;
  at::Tensor transpose_product(const at::Tensor& w) const override;
  at::Tensor product(const at::Tensor& x) const override;
  at::Tensor weighted_rows(const at::Tensor& w) const override;

 private:
  void add_gram_by_pairs_(at::Tensor& K, double weight) const;
  void add_gram_by_rows_(at::Tensor& K, double weight) const;

  at::Tensor A_;  // [n, groups, T, fan_in]
  at::Tensor G_;  // [n, groups, T, fan_out]
  std::vector<int64_t> shape_;
};

}  // namespace torchium::gradients::detail
