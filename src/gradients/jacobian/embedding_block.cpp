#include "gradients/jacobian/embedding_block.h"

#include "gradients/jacobian/embedding_gram.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::gradients::detail {
EmbeddingBlock::EmbeddingBlock(at::Tensor indices, at::Tensor e, int64_t table_rows)
    : indices_(std::move(indices)), e_(std::move(e)), table_rows_(table_rows) {}

void EmbeddingBlock::add_gram_(at::Tensor& K, double weight) const {
  if (K.is_cpu()) {
    add_embedding_gram_on_cpu_(K, indices_, e_, weight);
    return;
  }
  add_embedding_gram_(K, indices_, e_, table_rows_, weight);
}

at::Tensor EmbeddingBlock::transpose_product(const at::Tensor& w) const {
  return at::embedding_dense_backward(e_ * w.view({-1, 1, 1}), indices_, table_rows_,
                                      /*padding_idx=*/-1, /*scale_grad_by_freq=*/false);
}

at::Tensor EmbeddingBlock::product(const at::Tensor& x) const {
  return (at::embedding(x, indices_) * e_).sum(at::IntArrayRef({1, 2}), false, at::kDouble);
}

void EmbeddingBlock::add_squared_norms_(at::Tensor& squares, int64_t max_workspace_bytes) const {
  const int64_t n = indices_.size(0);
  const int64_t of_sample = indices_.size(1) * e_.size(2) * static_cast<int64_t>(e_.itemsize());
  const int64_t count = std::max<int64_t>(1, max_workspace_bytes / std::max<int64_t>(1, of_sample));
  for (int64_t first = 0; first < n; first += count) {
    const int64_t some = std::min(count, n - first);
    squares.narrow(0, first, some)
        .add_(squared_lookup_norms(indices_.narrow(0, first, some), e_.narrow(0, first, some),
                                   table_rows_));
  }
}

at::Tensor EmbeddingBlock::weighted_rows(const at::Tensor& w,
                                         int64_t /*max_workspace_bytes*/) const {
  return scatter_lookups(indices_, w.defined() ? e_ * w.view({-1, 1, 1}) : e_, table_rows_);
}

}  // namespace torchium::gradients::detail
