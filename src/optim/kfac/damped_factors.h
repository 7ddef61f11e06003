// The two factors of a layer while they are inverted.
#pragma once

#include "optim/kfac/kfac_layer.h"

#include <ATen/core/Tensor.h>

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

struct DampedFactors {
  explicit DampedFactors(KfacLayer& of) : layer(&of), A{solvable(of.A)}, G{solvable(of.G)} {}

  KfacLayer* layer;
  DampedFactor A, G;
};

// target [groups, ...] <- value where `accepted` [groups].
void assign_accepted(at::Tensor& target, const at::Tensor& value, const at::Tensor& accepted);

}  // namespace torchium::optim::detail
