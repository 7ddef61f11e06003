#include "optim/kfac_inverses.h"

#include "linalg/eigh.h"
#include "linalg/spectral.h"
#include "linalg/stack_groups.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace torchium::optim::detail {
namespace {

using linalg::detail::StackGroup;

// Eigensystems are accepted up to this residual; right ones have about 1e-6 in float32.
constexpr double kEigensystemTolerance = 1e-2;

// One of the two factors of a layer, and what is made of it.
struct Factor {
  at::Tensor matrices;  // [groups, n, n]
  at::Tensor shift;     // [groups] float64, added to the eigenvalues of an inverse
  double floor;
  at::Tensor root = {};         // [groups, n, n]
  at::Tensor eigenvalues = {};  // [groups, n] float64, floored
  at::Tensor accepted = {};     // [groups] bool
};

struct LayerFactors {
  KfacLayer* layer;
  Factor A;
  Factor G;
};

// Mean of the diagonal of each matrix, not below `floor`.
at::Tensor mean_diagonal(const at::Tensor& matrices, double floor) {
  const at::Tensor mean = matrices.diagonal(0, -2, -1).mean(-1, false, at::kDouble);
  const double smallest = std::max(floor, linalg::detail::smallest_normal(matrices.scalar_type()));
  return at::where(mean.gt(smallest), mean, at::full_like(mean, smallest));
}

LayerFactors make_factors(KfacLayer& layer, DampingSplit split) {
  LayerFactors factors{&layer, {layer.A, {}, layer.floor}, {layer.G, {}, layer.floor}};
  if (split == DampingSplit::kExact) {
    return factors;
  }
  const at::Tensor pi =
      split == DampingSplit::kPlain
          ? at::ones({layer.A.size(0)}, layer.A.options().dtype(at::kDouble))
          : (mean_diagonal(layer.A, layer.floor) / mean_diagonal(layer.G, layer.floor)).sqrt_();
  factors.A.shift = pi * std::sqrt(layer.damping);
  factors.G.shift = std::sqrt(layer.damping) / pi;
  return factors;
}

// Eigensystems of the factors of a group: their eigenvectors, or (F + shift I)^-1.
void solve(const std::vector<Factor*>& factors, at::TensorList matrices, const StackGroup& group,
           DampingSplit split) {
  std::vector<at::Tensor> floors;
  std::vector<at::Tensor> shifts;
  for (const size_t i : group) {
    const Factor& factor = *factors[i];
    floors.push_back(at::full({factor.matrices.size(0)}, factor.floor,
                              factor.matrices.options().dtype(at::kDouble)));
    if (split != DampingSplit::kExact) {
      shifts.push_back(factor.shift);
    }
  }
  const auto input = linalg::detail::normalize_symmetric(
      linalg::detail::joined_stacks(matrices, group), /*eps=*/0.0);
  const auto system = linalg::detail::symmetric_eigensystem(input.matrix);
  const at::Tensor values = at::maximum(system.values.to(at::kDouble) / input.scale.unsqueeze(-1),
                                        at::cat(floors).unsqueeze(-1));
  at::Tensor roots = system.vectors;
  if (split != DampingSplit::kExact) {
    const at::Tensor inverses = (values + at::cat(shifts).unsqueeze(-1)).reciprocal_();
    roots = linalg::detail::compose(system.vectors, inverses, /*non_negative=*/true);
  }
  // The sum of a matrix is finite only if all entries are; overflow of a sum counts as failure.
  const at::Tensor accepted = linalg::detail::spectral_residual(input.matrix, system)
                                  .le(kEigensystemTolerance)
                                  .logical_and_(input.finite)
                                  .logical_and_(at::isfinite(roots.sum({-2, -1})));
  const auto root = linalg::detail::split_by_stack(roots, matrices, group);
  const auto eigenvalues = linalg::detail::split_by_stack(values, matrices, group);
  const auto verdict = linalg::detail::split_by_stack(accepted, matrices, group);
  for (size_t k = 0; k < group.size(); ++k) {
    Factor& factor = *factors[group[k]];
    factor.root = root[k];
    factor.eigenvalues = eigenvalues[k];
    factor.accepted = verdict[k];
  }
}

// target [groups, ...] <- value where `accepted` [groups].
void assign_accepted(at::Tensor& target, const at::Tensor& value, const at::Tensor& accepted) {
  std::vector<int64_t> sizes(target.dim(), 1);
  sizes[0] = -1;
  target.copy_(at::where(accepted.view(sizes), value.to(target.scalar_type()), target));
}

void take(LayerFactors& factors, DampingSplit split, const StepGate& gate) {
  KfacLayer& layer = *factors.layer;
  const at::Tensor accepted = gate.restrict(factors.A.accepted.logical_and(factors.G.accepted));
  const auto renew = [&](const Factor& factor, at::Tensor& root, at::Tensor& eigenvalues) {
    assign_accepted(root, factor.root, accepted);
    if (split == DampingSplit::kExact) {
      assign_accepted(eigenvalues, factor.eigenvalues, accepted);
    }
  };
  renew(factors.A, layer.A_root, layer.A_eigenvalues);
  renew(factors.G, layer.G_root, layer.G_eigenvalues);
  const at::Tensor ok = at::stack({factors.A.accepted.all(), factors.G.accepted.all()});
  at::Tensor& failures = layer.root_failures;
  gate.assign_(failures, at::where(ok, at::zeros_like(failures), failures + 1));
}

}  // namespace

void update_inverses(std::vector<KfacLayer>& layers, DampingSplit split, const StepGate& gate) {
  std::vector<LayerFactors> due;
  for (KfacLayer& layer : layers) {
    if (layer.inverse_due) {
      due.push_back(make_factors(layer, split));
    }
  }
  std::vector<Factor*> factors;
  std::vector<at::Tensor> matrices;
  for (LayerFactors& layer : due) {
    for (Factor* factor : {&layer.A, &layer.G}) {
      factors.push_back(factor);
      matrices.push_back(factor->matrices);
    }
  }
  for (const auto& group : linalg::detail::group_by_order(matrices)) {
    solve(factors, matrices, group, split);
  }
  for (LayerFactors& layer : due) {
    take(layer, split, gate);
  }
}

}  // namespace torchium::optim::detail
