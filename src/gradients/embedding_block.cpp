#include "gradients/embedding_block.h"

#include "gradients/embedding_gram.h"
#include "gradients/random_vectors.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

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

at::Tensor EmbeddingBlock::add_up(const at::Tensor& e, const at::Tensor& w) const {
  return at::embedding_dense_backward(e * w.view({-1, 1, 1}), indices_, table_rows_,
                                      /*padding_idx=*/-1, /*scale_grad_by_freq=*/false);
}

at::Tensor EmbeddingBlock::transpose_product(const at::Tensor& w) const { return add_up(e_, w); }

std::pair<at::Tensor, at::Tensor> EmbeddingBlock::sketch(const at::Tensor& x,
                                                         const at::Tensor& w) const {
  const at::NoTF32Guard full_precision;
  const at::Tensor Q = random_vectors(e_.size(2), w.options()).t();
  return {at::mm(x, Q), add_up(at::matmul(e_, Q), w)};
}

at::Tensor EmbeddingBlock::product(const at::Tensor& x) const {
  return (at::embedding(x, indices_) * e_).sum(at::IntArrayRef({1, 2}), false, at::kDouble);
}

at::Tensor EmbeddingBlock::weighted_rows(const at::Tensor& w) const {
  return scatter_lookups(indices_, e_ * w.view({-1, 1, 1}), table_rows_);
}

}  // namespace torchium::gradients::detail
