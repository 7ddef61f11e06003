// The two factors of a layer while they are inverted.
#pragma once

#include "optim/kfac/kfac_layer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/mean.h>

namespace torchium::optim::detail {

// A or G, and its solution.
struct DampedFactor {
  at::Tensor matrices;          // [groups, n, n], or their diagonals [groups, n]
  at::Tensor damping = {};      // [groups] float64, at least the floor; undefined with kExact
  at::Tensor root = {};         // as the matrices
  at::Tensor eigenvalues = {};  // [groups, n] float64; undefined: not known
  at::Tensor accepted = {};     // [groups] bool
};

// A stored factor in a dtype that solvers know.
inline at::Tensor solvable(const at::Tensor& factor) {
  return factor.scalar_type() == at::kBFloat16 ? factor.to(at::kFloat) : factor;
}

// A without its products of weights and bias: the inverse has that of the weights alone. The entry
// of the bias becomes the mean of theirs, and does not change their damping.
inline at::Tensor without_last_row(const at::Tensor& A) {
  if (A.dim() == 2) return A;  // a diagonal
  at::Tensor result = A.clone();
  const int64_t last = A.size(-1) - 1;
  const at::Tensor mean = A.diagonal(0, -2, -1).narrow(-1, 0, last).mean(-1, /*keepdim=*/true);
  result.select(-2, last).zero_();
  result.select(-1, last).zero_();
  result.diagonal(0, -2, -1).narrow(-1, last, 1).copy_(mean);
  return result;
}

struct DampedFactors {
  explicit DampedFactors(KfacLayer& of)
      : layer(&of),
        A{of.has_spare_row ? without_last_row(solvable(of.A)) : solvable(of.A)},
        G{solvable(of.G)} {}

  KfacLayer* layer;
  DampedFactor A, G;
};

// target [groups, ...] <- value where `accepted` [groups].
void assign_accepted(at::Tensor& target, const at::Tensor& value, const at::Tensor& accepted);

}  // namespace torchium::optim::detail
