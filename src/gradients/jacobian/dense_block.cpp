#include "gradients/jacobian/dense_block.h"

#include "gradients/jacobian/device_sums.h"
#include "linalg/products/symmetric_update.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::gradients::detail {

void add_product_of_rows_(at::Tensor& K, const at::Tensor& R, double weight) {
  const int64_t n = std::max<int64_t>(1, R.size(0));
  const int64_t elements = K.is_cuda() ? int64_t{1} << 26 : kMaxWorkspaceElements;
  const int64_t chunk = std::max<int64_t>(1, elements / n);
  at::Tensor stack = K.unsqueeze(0);
  for (int64_t first = 0; first < R.size(1); first += chunk) {
    const at::Tensor columns = R.narrow(1, first, std::min(chunk, R.size(1) - first));
    linalg::detail::symmetric_update_(stack, columns.to(at::kDouble).unsqueeze(0), 1.0, weight);
  }
}

at::Tensor squared_norms_of(const at::Tensor& R) {
  return at::linalg_vector_norm(flat_rows(R), 2, at::IntArrayRef({1}), false, at::kDouble)
      .square_();
}

void DenseBlock::add_gram_(at::Tensor& K, double weight) const {
  add_product_of_rows_(K, flat_rows(rows()), weight);
}

Added DenseBlock::add_gram_to(GramSums& sums, double weight, double /*bias_weight*/) const {
  if (rows().scalar_type() != at::kFloat) {
    return Added::kNothing;
  }
  sums.add(rows(), weight);
  return Added::kBlock;
}

at::Tensor DenseBlock::transpose_product(const at::Tensor& w) const {
  return at::mv(flat_rows(rows()).t(), w).view(rows().sizes().slice(1));
}

at::Tensor DenseBlock::product(const at::Tensor& x) const {
  return at::mv(flat_rows(rows()), x.reshape(-1)).to(at::kDouble);
}

void DenseBlock::add_squared_norms_(at::Tensor& squares, int64_t /*max_workspace_bytes*/) const {
  squares.add_(squared_norms_of(rows()));
}

Added DenseBlock::add_norms_to(NormSums& sums, bool /*has_bias*/,
                               int64_t /*max_workspace_bytes*/) const {
  if (rows().scalar_type() != at::kFloat) {
    return Added::kNothing;
  }
  sums.add(rows());
  return Added::kBlock;
}

at::Tensor DenseBlock::weighted_rows(const at::Tensor& w, int64_t /*max_workspace_bytes*/) const {
  if (!w.defined()) {
    return rows().clone(at::MemoryFormat::Contiguous);
  }
  return (flat_rows(rows()) * w.unsqueeze(1)).view(rows().sizes());
}

}  // namespace torchium::gradients::detail
