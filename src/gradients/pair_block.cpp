#include "gradients/pair_block.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <utility>

namespace torchium::gradients::detail {
namespace {

// Samples first and second, both stacks of positions, as float64 matrices [groups, samples T, k].
at::Tensor as_columns(const at::Tensor& stack, int64_t first, int64_t count) {
  const at::Tensor samples = stack.narrow(0, first, count).to(at::kDouble);
  return samples.transpose(0, 1).reshape({stack.size(1), count * stack.size(2), stack.size(3)});
}

}  // namespace

PairBlock::PairBlock(Positions positions, at::IntArrayRef shape)
    : A_(std::move(positions.A)), G_(std::move(positions.G)), shape_(shape.vec()) {}

void PairBlock::add_gram_(at::Tensor& K, double weight) const {
  const double n = static_cast<double>(A_.size(0));
  const double T = static_cast<double>(A_.size(2));
  const double p = static_cast<double>(A_.size(3));
  const double o = static_cast<double>(G_.size(3));
  // Multiplications a group. A pair of samples needs T^2 inner products of each kind, or, once
  // every row is formed, one of length p o.
  const double by_pairs = n * n * T * T * (p + o);
  const double by_rows = n * T * p * o + n * n * p * o;
  if (by_pairs <= by_rows) {
    add_gram_by_pairs_(K, weight);
  } else {
    add_gram_by_rows_(K, weight);
  }
}

// K_ij += weight * sum over groups, t and s of (a_it . a_js) (g_it . g_js)
void PairBlock::add_gram_by_pairs_(at::Tensor& K, double weight) const {
  const int64_t n = A_.size(0);
  const int64_t groups = A_.size(1);
  const int64_t T = A_.size(2);
  const int64_t of_sample = std::max<int64_t>(1, groups * T * std::max(A_.size(3), G_.size(3)));
  const int64_t of_pair = std::max<int64_t>(1, groups * T * T);
  int64_t chunk = std::max<int64_t>(1, kMaxWorkspaceElements / of_sample);
  while (chunk > 1 && chunk * chunk > kMaxWorkspaceElements / of_pair) {
    chunk /= 2;
  }
  for (int64_t i = 0; i < n; i += chunk) {
    const int64_t rows = std::min(chunk, n - i);
    const at::Tensor A_i = as_columns(A_, i, rows);
    const at::Tensor G_i = as_columns(G_, i, rows);
    for (int64_t j = 0; j <= i; j += chunk) {
      const int64_t columns = std::min(chunk, n - j);
      const at::Tensor A_j = j == i ? A_i : as_columns(A_, j, columns);
      const at::Tensor G_j = j == i ? G_i : as_columns(G_, j, columns);
      const at::Tensor products = at::bmm(A_i, A_j.mT()).mul_(at::bmm(G_i, G_j.mT()));
      const at::Tensor sums =
          products.view({groups, rows, T, columns, T}).sum(at::IntArrayRef({0, 2, 4}));
      K.narrow(0, i, rows).narrow(1, j, columns).add_(sums, weight);
      if (j < i) {
        K.narrow(0, j, columns).narrow(1, i, rows).add_(sums.t(), weight);
      }
    }
  }
}

void PairBlock::add_gram_by_rows_(at::Tensor& K, double weight) const {
  const int64_t n = A_.size(0);
  const int64_t of_output = std::max<int64_t>(1, n * A_.size(1) * A_.size(3));
  const int64_t chunk = std::max<int64_t>(1, kMaxWorkspaceElements / of_output);
  for (int64_t first = 0; first < G_.size(3); first += chunk) {
    const at::Tensor G = G_.narrow(3, first, std::min(chunk, G_.size(3) - first));
    add_product_of_rows_(K, at::matmul(G.mT(), A_).flatten(1), weight);
  }
}

at::Tensor PairBlock::transpose_product(const at::Tensor& w) const {
  const at::NoTF32Guard full_precision;
  const at::Tensor weighted = G_ * w.view({-1, 1, 1, 1});
  if (A_.size(1) == 1) {
    return at::mm(weighted.reshape({-1, G_.size(3)}).t(), A_.reshape({-1, A_.size(3)}))
        .view(shape_);
  }
  at::Tensor result = at::zeros({A_.size(1), G_.size(3), A_.size(3)}, A_.options());
  for (int64_t i = 0; i < A_.size(0); ++i) {
    result.baddbmm_(weighted.select(0, i).mT(), A_.select(0, i));
  }
  return result.view(shape_);
}

at::Tensor PairBlock::product(const at::Tensor& x) const {
  const at::NoTF32Guard full_precision;
  const at::Tensor matrices = x.reshape({A_.size(1), G_.size(3), A_.size(3)});
  return (at::matmul(A_, matrices.mT()) * G_).sum(at::IntArrayRef({1, 2, 3}), false, at::kDouble);
}

at::Tensor PairBlock::weighted_rows(const at::Tensor& w) const {
  const at::NoTF32Guard full_precision;
  std::vector<int64_t> sizes{A_.size(0)};
  sizes.insert(sizes.end(), shape_.begin(), shape_.end());
  return at::matmul((G_ * w.view({-1, 1, 1, 1})).mT(), A_).reshape(sizes);
}

}  // namespace torchium::gradients::detail
