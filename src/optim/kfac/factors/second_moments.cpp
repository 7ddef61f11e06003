#include "optim/kfac/factors/second_moments.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {
namespace {

// (U'^T U)^2, element by element, which maps second moments from the basis U to U'. Undefined for
// the identity.
at::Tensor squared_overlaps(const at::Tensor& U, const at::Tensor& renewed) {
  return U.dim() == 2 ? at::Tensor() : at::bmm(renewed.to(U.scalar_type()).mT(), U).square_();
}

// diag(U'^T (U diag(s) U^T) U') for U = U_G (x) U_A: P_G s P_A^T with squared overlaps P.
at::Tensor in_new_basis(const DampedFactors& factors) {
  const KfacLayer& layer = *factors.layer;
  const at::Tensor P_G = squared_overlaps(layer.G_root, factors.G.root);
  const at::Tensor P_A = squared_overlaps(layer.A_root, factors.A.root);
  at::Tensor s = layer.second_moments;
  s = P_G.defined() ? at::bmm(P_G, s) : s;
  return P_A.defined() ? at::bmm(s, P_A.mT()) : s;
}

}  // namespace

void renew_second_moments(const std::deque<DampedFactors>& layers, const FoundInfGuard& guard) {
  for (const DampedFactors& factors : layers) {
    KfacLayer& layer = *factors.layer;
    if (!layer.second_moments.defined()) {
      continue;
    }
    const auto floored = [&](const at::Tensor& values) { return values.clamp_min(layer.floor); };
    const at::Tensor of_factors =
        floored(factors.G.eigenvalues).unsqueeze(-1) * floored(factors.A.eigenvalues).unsqueeze(-2);
    const at::Tensor renewed =
        at::where(layer.moment_updates.eq(0), of_factors.to(layer.second_moments.scalar_type()),
                  in_new_basis(factors));
    assign_accepted(layer.second_moments, renewed,
                    guard.restrict(factors.A.accepted.logical_and(factors.G.accepted)));
  }
}

}  // namespace torchium::optim::detail
