#pragma once

#include "gradients/jacobian/jacobian_block.h"

namespace torchium::gradients::detail {

// Row i is zero except in the table rows that sample i has looked up: the sum over its positions t
// of e[i, t] at row indices[i, t].
class EmbeddingBlock : public JacobianBlock {
 public:
  // indices: [n, T] int64 below `table_rows`; e: [n, T, dim] in the state dtype.
  EmbeddingBlock(at::Tensor indices, at::Tensor e, int64_t table_rows);

  void add_gram_(at::Tensor& K, double weight) const override;
  at::Tensor transpose_product(const at::Tensor& w) const override;
  at::Tensor product(const at::Tensor& x) const override;
  void add_squared_norms_(at::Tensor& squares, int64_t max_workspace_bytes) const override;
  at::Tensor weighted_rows(const at::Tensor& w, int64_t max_workspace_bytes) const override;

 private:
  at::Tensor indices_;
  at::Tensor e_;
  int64_t table_rows_;
};

}  // namespace torchium::gradients::detail
