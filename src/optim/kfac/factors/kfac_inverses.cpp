#include "optim/kfac/factors/kfac_inverses.h"

#include "linalg/matrix_functions/matrix_functions.h"
#include "linalg/matrix_functions/matrix_groups.h"
#include "linalg/products/symmetric_storage.h"
#include "linalg/roots/device_newton.h"
#include "linalg/roots/newton.h"
#include "linalg/spectral/eigh.h"
#include "linalg/spectral/spectral.h"
#include "optim/kfac/cuda/inverse_kernels.h"
#include "optim/kfac/damped_factors.h"
#include "optim/kfac/factors/second_moments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <deque>

namespace torchium::optim::detail {
namespace {

using linalg::detail::MatrixGroup;

// The largest accepted residual of an eigensystem; correct ones have about 1e-6 in float32.
constexpr double kEigensystemTolerance = 1e-2;

// Mean of the diagonal of each matrix, not below `floor`.
at::Tensor mean_diagonal(const at::Tensor& matrices, double floor) {
  const at::Tensor diagonals = matrices.dim() == 2 ? matrices : matrices.diagonal(0, -2, -1);
  const at::Tensor mean = diagonals.mean(-1, false, at::kDouble);
  const double smallest = std::max(floor, linalg::detail::smallest_normal(matrices.scalar_type()));
  return at::where(mean.gt(smallest), mean, at::full_like(mean, smallest));
}

void set_dampings(DampedFactors& factors, DampingSplit split) {
  if (split == DampingSplit::kExact) {
    return;
  }
  const KfacLayer& layer = *factors.layer;
  const at::Tensor pi = split == DampingSplit::kPlain
                            ? at::ones({layer.A.size(0)}, layer.A.options().dtype(at::kDouble))
                            : (mean_diagonal(factors.A.matrices, layer.floor) /
                               mean_diagonal(factors.G.matrices, layer.floor))
                                  .sqrt_();
  factors.A.damping = (pi * std::sqrt(layer.damping)).clamp_min(layer.floor);
  factors.G.damping = (std::sqrt(layer.damping) / pi).clamp_min(layer.floor);
}

// The factors of one order, as one buffer.
struct Joined {
  at::Tensor matrices;  // [N, n, n]
  at::Tensor dampings;  // [N] float64; undefined with kExact
};

Joined join(const std::vector<DampedFactor*>& factors, at::TensorList matrices,
            const MatrixGroup& group) {
  std::vector<at::Tensor> dampings;
  for (const size_t i : group) {
    if (factors[i]->damping.defined()) {
      dampings.push_back(factors[i]->damping);
    }
  }
  return {linalg::detail::joined_matrices(matrices, group),
          dampings.empty() ? at::Tensor() : at::cat(dampings)};
}

struct Solution {
  at::Tensor roots;     // [N, n, n]: inverses, or eigenvectors with kExact
  at::Tensor values;    // [N, n]: eigenvalues; undefined where the iteration made the inverse
  at::Tensor accepted;  // [N] bool
};

// By eigenvalues: eigenvectors, or (F + damping I)^-1.
Solution solve_by_eigh(const Joined& joined) {
  const auto input = linalg::detail::normalize_symmetric(joined.matrices, /*eps=*/0.0);
  const auto system = linalg::detail::symmetric_eigensystem(input.matrix);
  at::Tensor values = system.values.to(at::kDouble) / input.scale.unsqueeze(-1);
  at::Tensor roots = system.vectors;
  if (joined.dampings.defined()) {
    const at::Tensor inverses =
        (values.clamp_min(0.0) + joined.dampings.unsqueeze(-1)).reciprocal_();
    roots = linalg::detail::compose(system.vectors, inverses, /*non_negative=*/true);
  }
  const at::Tensor accepted = linalg::detail::spectral_residual(input.matrix, system)
                                  .le(kEigensystemTolerance)
                                  .logical_and_(input.finite)
                                  .logical_and_(linalg::detail::is_finite(roots));
  return {roots, values, accepted};
}

// By Cholesky factors: (F + damping I)^-1. Pivots as small as the rounding error of an eigenvalue
// are rejected. On the CPU these matrices are then solved by eigenvalues.
Solution solve_by_cholesky(const Joined& joined) {
  const auto input = linalg::detail::normalize_symmetric(joined.matrices, /*eps=*/0.0);
  const at::ScalarType dtype = input.matrix.scalar_type();
  const at::Tensor damped = input.matrix.clone();
  damped.diagonal(0, -2, -1).add_((joined.dampings * input.scale).to(dtype).unsqueeze(-1));
  auto [L, info] = at::linalg_cholesky_ex(damped);
  // cholesky_inverse() would raise for a singular matrix.
  const at::Tensor identity = at::eye(L.size(-1), L.options());
  L = at::where(info.eq(0).view({-1, 1, 1}), L, identity);
  at::Tensor roots = at::cholesky_inverse(L).mT().contiguous();
  linalg::detail::mirror_lower_(roots);
  roots = (roots * input.scale.view({-1, 1, 1})).to(dtype);
  const at::Tensor smallest = L.diagonal(0, -2, -1).square().amin(-1);
  const at::Tensor noise =
      damped.abs().amax({-2, -1}) * linalg::detail::eigenvalue_noise(damped.size(-1), dtype);
  const at::Tensor accepted = smallest.gt(noise)
                                  .logical_and_(info.eq(0))
                                  .logical_and_(input.finite)
                                  .logical_and_(linalg::detail::is_finite(roots));
  if (!accepted.is_cpu() || accepted.all().item<bool>()) {
    return {roots, {}, accepted};
  }
  const at::Tensor which = accepted.logical_not().nonzero().flatten();
  const auto of_which = [&](const at::Tensor& tensor) { return tensor.index_select(0, which); };
  const Solution others = solve_by_eigh({of_which(joined.matrices), of_which(joined.dampings)});
  return {
      roots.index_copy(0, which, others.roots), {}, accepted.index_copy(0, which, others.accepted)};
}

// The smallest damping that an iteration resolves, relative to the factor's Frobenius norm.
double least_damping(at::ScalarType dtype) { return dtype == at::kDouble ? 0x1p-46 : 0x1p-20; }

// (F + s I)^-1, where kernels take a damping for each matrix. Of a failed one, or one that is not
// finite, the residual is not small.
Solution solve_by_kernels(const Joined& joined) {
  const auto solved = linalg::detail::device_inverse(joined.matrices, joined.dampings.contiguous(),
                                                     least_damping(joined.matrices.scalar_type()));
  return {solved.root, {}, solved.residual.le(linalg::detail::kNewtonResidualTolerance)};
}

// (F + s I)^-1 = (F / s + I)^-1 / s, so that all matrices have the same damping.
Solution solve_by_root(const Joined& joined) {
  const at::ScalarType dtype = joined.matrices.scalar_type();
  const at::Tensor largest = joined.matrices.flatten(1).abs().amax(1).to(at::kDouble);
  const at::Tensor norm =  // entries may be too large to square
      (joined.matrices.flatten(1) /
       largest.clamp_min(linalg::detail::smallest_normal(dtype)).unsqueeze(-1))
          .norm(2, 1) *
      largest;
  const at::Tensor s =
      at::maximum(joined.dampings, norm * least_damping(dtype)).to(dtype).view({-1, 1, 1});
  const auto solved = linalg::detail::matrix_inverse_root(
      joined.matrices / s, /*root=*/1,
      /*eps=*/1.0, /*relative_eps=*/0.0, "newton", linalg::detail::Residual::kEstimate);
  const at::Tensor roots = solved.root / s;
  const at::Tensor accepted = solved.residual.le(linalg::detail::kNewtonResidualTolerance)
                                  .logical_and_(linalg::detail::is_finite(roots));
  return {roots, {}, accepted};
}

Solution solve(const Joined& joined, const std::string& solver) {
  if (solver == "eigh" || !joined.dampings.defined()) {
    return solve_by_eigh(joined);
  }
  if (solver != "cholesky" && linalg::detail::has_device_root(joined.matrices, /*p=*/1)) {
    return solve_by_kernels(joined);
  }
  return solver == "newton" ? solve_by_root(joined) : solve_by_cholesky(joined);
}

void solve(const std::vector<DampedFactor*>& factors, at::TensorList matrices,
           const MatrixGroup& group, const std::string& solver) {
  const Solution solution = solve(join(factors, matrices, group), solver);
  // At once for all layers: kernels read contiguous roots.
  const at::Tensor roots = solution.roots.is_cpu() ? solution.roots : solution.roots.contiguous();
  const auto root = linalg::detail::split_by_buffer(roots, matrices, group);
  const auto accepted = linalg::detail::split_by_buffer(solution.accepted, matrices, group);
  for (size_t k = 0; k < group.size(); ++k) {
    factors[group[k]]->root = root[k];
    factors[group[k]]->accepted = accepted[k];
  }
  if (solution.values.defined()) {
    const auto values = linalg::detail::split_by_buffer(solution.values, matrices, group);
    for (size_t k = 0; k < group.size(); ++k) {
      factors[group[k]]->eigenvalues = values[k];
    }
  }
}

// The same for a factor stored as its diagonal, whose eigenvectors are the identity.
void solve_diagonal(DampedFactor& factor) {
  const at::Tensor values = factor.matrices.to(at::kDouble);
  factor.eigenvalues = values;
  factor.root = factor.damping.defined()
                    ? (values.clamp_min(0.0) + factor.damping.unsqueeze(-1)).reciprocal_()
                    : at::ones_like(factor.matrices);
  const at::Tensor largest = factor.root.to(factor.matrices.scalar_type()).amax(-1);
  factor.accepted = at::isfinite(factor.matrices.sum(-1)).logical_and_(at::isfinite(largest));
}

// Takes the roots and eigenvalues of groups of which both factors were accepted, and counts
// consecutive failures.
void take_accepted(const DampedFactors& factors, DampingSplit split, const FoundInfGuard& guard) {
  KfacLayer& layer = *factors.layer;
  const at::Tensor accepted = guard.restrict(factors.A.accepted.logical_and(factors.G.accepted));
  const auto renew = [&](const DampedFactor& factor, at::Tensor& root, at::Tensor& eigenvalues) {
    assign_accepted(root, factor.root, accepted);
    if (split == DampingSplit::kExact) {
      assign_accepted(eigenvalues, factor.eigenvalues.clamp_min(layer.floor), accepted);
    }
  };
  renew(factors.A, layer.A_root, layer.A_eigenvalues);
  renew(factors.G, layer.G_root, layer.G_eigenvalues);
  const at::Tensor ok = at::stack({factors.A.accepted.all(), factors.G.accepted.all()});
  at::Tensor& failures = layer.root_failures;
  guard.assign_(failures, at::where(ok, at::zeros_like(failures), failures + 1));
}

}  // namespace

void assign_accepted(at::Tensor& target, const at::Tensor& value, const at::Tensor& accepted) {
  std::vector<int64_t> sizes(target.dim(), 1);
  sizes[0] = -1;
  target.copy_(at::where(accepted.view(sizes), value.to(target.scalar_type()), target));
}

void update_inverses(std::vector<KfacLayer>& layers, bool KfacLayer::*wanted, DampingSplit split,
                     const std::string& solver, const FoundInfGuard& guard) {
  std::deque<DampedFactors> due;
  std::vector<DampedFactors*> by_kernels, eager;
  for (KfacLayer& layer : layers) {
    if (layer.*wanted && layer.inverts) {
      const bool has_kernels = layer.has_state_dtype() && has_inverse_kernels(layer);
      (has_kernels ? by_kernels : eager).push_back(&due.emplace_back(layer));
    }
  }
  set_dampings_by_kernel(by_kernels, split);
  for (DampedFactors* layer : eager) {
    set_dampings(*layer, split);
  }
  std::vector<DampedFactor*> factors;
  std::vector<at::Tensor> matrices;
  for (DampedFactors& layer : due) {
    for (DampedFactor* factor : {&layer.A, &layer.G}) {
      if (factor->matrices.dim() == 2) {
        solve_diagonal(*factor);
      } else {
        factors.push_back(factor);
        matrices.push_back(factor->matrices);
      }
    }
  }
  for (const auto& group : linalg::detail::group_by_order(matrices)) {
    solve(factors, matrices, group, solver);
  }
  renew_second_moments(due, guard);
  take_accepted_by_kernel(by_kernels, guard);
  for (const DampedFactors* layer : eager) {
    take_accepted(*layer, split, guard);
  }
}

}  // namespace torchium::optim::detail
