#include "gradients/embedding_block.h"

#include "gradients/embedding_gram.h"
#include "gradients/random_vectors.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace torchium::gradients::detail {
namespace {

// rows[i, k, :] = the sum of e[i, t, :] over all t with indices[i, t] = k: [n, table_rows, dim]
at::Tensor scatter(const at::Tensor& indices, const at::Tensor& e, int64_t table_rows) {
  const int64_t n = indices.size(0);
  const at::Tensor first = at::arange(n, indices.options()).mul_(table_rows).unsqueeze(1);
  // Not index_add_, whose order of summation on a GPU changes from run to run.
  return at::embedding_dense_backward(e, indices + first, n * table_rows, /*padding_idx=*/-1,
                                      /*scale_grad_by_freq=*/false)
      .view({n, table_rows, e.size(2)});
}

// The same indices counted from zero without gaps: at most one number a position, in an order that
// is of no importance to products of two rows. Nothing is read by the host.
at::Tensor renumbered(const at::Tensor& indices) {
  const auto [sorted, order] = at::sort(indices.flatten());
  const at::Tensor is_new = at::zeros_like(sorted);
  is_new.narrow(0, 1, sorted.numel() - 1)
      .copy_(sorted.narrow(0, 1, sorted.numel() - 1) != sorted.narrow(0, 0, sorted.numel() - 1));
  return at::empty_like(sorted).scatter_(0, order, is_new.cumsum(0)).view(indices.sizes());
}

}  // namespace

EmbeddingBlock::EmbeddingBlock(at::Tensor indices, at::Tensor e, int64_t table_rows)
    : indices_(std::move(indices)), e_(std::move(e)), table_rows_(table_rows) {}

void EmbeddingBlock::add_gram_(at::Tensor& K, double weight) const {
  if (K.is_cpu()) {
    add_embedding_gram_on_cpu_(K, indices_, e_, weight);
    return;
  }
  if (indices_.numel() == 0) {
    return;
  }
  const int64_t n = indices_.size(0);
  const bool many_rows = indices_.numel() < table_rows_;
  const at::Tensor indices = many_rows ? renumbered(indices_) : indices_;
  const int64_t table_rows = many_rows ? indices_.numel() : table_rows_;
  const int64_t chunk =
      std::max<int64_t>(1, kMaxWorkspaceElements / std::max<int64_t>(1, n * table_rows));
  for (int64_t first = 0; first < e_.size(2); first += chunk) {
    const at::Tensor columns = e_.narrow(2, first, std::min(chunk, e_.size(2) - first));
    add_product_of_rows_(K, scatter(indices, columns, table_rows).flatten(1), weight);
  }
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
  return scatter(indices_, e_ * w.view({-1, 1, 1}), table_rows_);
}

}  // namespace torchium::gradients::detail
