#include "linalg/decompositions/spd.h"

#include "linalg/common/bounded_solution.h"
#include "linalg/common/operand_checks.h"
#include "linalg/decompositions/device_spd_inverse.h"
#include "linalg/products/symmetric_storage.h"
#include "linalg/spectral/eigh.h"
#include "linalg/spectral/spectral.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cholesky_inverse.h>
#include <ATen/ops/cholesky_solve.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_cholesky_ex.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/maximum.h>
#include <c10/util/Exception.h>

#include <tuple>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// scale * (A + damping I) = L L^T, with floored eigenvalues if A is singular.
struct Factor {
  at::Tensor L;       // [..., n, n] lower triangular
  at::Tensor scale;   // [...] float64
  at::Tensor finite;  // [...]: no NaN or Inf in the matrix
};

// L of matrices [N, n, n] whose eigenvalues are floored: from Q D Q^T, L^T is the triangle of
// max(D, floor)^(1/2) Q^T. least: [N], the smallest floor.
at::Tensor floored_factor(const at::Tensor& matrices, const at::Tensor& least) {
  const auto [values, vectors] = symmetric_eigensystem(matrices);
  const auto floor = spectral_floor(values, matrices.scalar_type(), least).unsqueeze(-1);
  const auto weights = at::maximum(values, floor).sqrt_();
  return std::get<1>(at::linalg_qr(weights.unsqueeze(-1) * vectors.mT(), "r")).mT();
}

// Cholesky. For matrices with a pivot as small as the rounding error of an eigenvalue, the floored
// eigendecomposition. On a GPU the host waits to learn whether there are any.
Factor factorise(const at::Tensor& A, double damping) {
  const auto dtype = compute_dtype(A);
  const auto n = A.size(-1);
  const auto batch = A.sizes().slice(0, A.dim() - 2);
  auto input = normalize_symmetric(as_batch(A.to(dtype)), damping);
  input.matrix.diagonal(0, -2, -1).add_((input.scale * damping).unsqueeze(-1));
  const auto largest = input.matrix.abs().amax({-2, -1});
  // A zero matrix is scaled to its floor, the smallest normal number.
  input.scale.masked_fill_(largest == 0, 1 / smallest_normal(dtype));

  auto [L, info] = at::linalg_cholesky_ex(input.matrix);
  const auto pivot = L.diagonal(0, -2, -1).square().amin(-1);
  const auto singular =
      (info != 0).logical_or_((pivot > largest * eigenvalue_noise(n, dtype)).logical_not_());
  if (singular.any().item().toBool()) {
    const auto which = singular.nonzero().flatten();
    const auto least = (input.scale * smallest_normal(dtype)).to(dtype);
    L.index_copy_(
        0, which,
        floored_factor(input.matrix.index_select(0, which), least.index_select(0, which)));
  }
  return {restore_batch(L, batch), restore_batch(input.scale, batch),
          restore_batch(input.finite, batch)};
}

void check_spd_inverse(const at::Tensor& A, double damping) {
  check_matrices("spd_inverse", {{"A", A}});
  check_square("spd_inverse", {"A", A});
  check_damping("spd_inverse", damping, A);
}

// Returns the sizes of the result, [..., n, m].
std::vector<c10::SymInt> check_spd_solve(const at::Tensor& A, const at::Tensor& X, double damping) {
  constexpr auto op = "spd_solve";
  check_matrices(op, {{"A", A}, {"X", X}});
  check_square(op, {"A", A});
  check_damping(op, damping, A);
  TORCH_CHECK_VALUE(A.sym_size(-1) == X.sym_size(-2), op, ": X has shape ", X.sym_sizes(),
                    "; with A ", A.sym_sizes(), " it must be [..., ", A.sym_size(-1), ", m]");
  auto sizes = broadcast_batch(op, {{"A", A}, {"X", X}});
  sizes.insert(sizes.end(), {X.sym_size(-2), X.sym_size(-1)});
  return sizes;
}

}  // namespace

at::Tensor spd_inverse_meta(const at::Tensor& A, double damping) {
  check_spd_inverse(A, damping);
  return at::empty_symint(A.sym_sizes(), A.options());
}

at::Tensor spd_inverse(const at::Tensor& A, double damping) {
  check_spd_inverse(A, damping);
  if (A.numel() == 0) return at::empty(A.sizes(), A.options());
  if (has_device_spd_inverse(A)) {
    return saturated(DeviceSpdInverse(A.to(at::kFloat), damping).inverse(), A.scalar_type());
  }
  const auto factor = factorise(A, damping);
  // LAPACK's layout is column-major, so the transpose is contiguous.
  auto inverse = as_batch(at::cholesky_inverse(factor.L).mT()).contiguous();
  mirror_lower_(inverse);
  return bounded_solution(inverse.view(A.sizes()), factor.scale, factor.finite, A.scalar_type());
}

at::Tensor spd_solve_meta(const at::Tensor& A, const at::Tensor& X, double damping) {
  return at::empty_symint(check_spd_solve(A, X, damping), X.options());
}

at::Tensor spd_solve(const at::Tensor& A, const at::Tensor& X, double damping) {
  const auto result_sizes = check_spd_solve(A, X, damping);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(result_sizes);
  if (c10::multiply_integers(sizes) == 0) return at::empty(sizes, X.options());
  if (has_device_spd_inverse(A)) {
    const DeviceSpdInverse inverse(A.to(at::kFloat), damping);
    return saturated(inverse.solution(X.to(at::kFloat)), X.scalar_type());
  }
  const auto factor = factorise(A, damping);
  return bounded_solution(at::cholesky_solve(X.to(factor.L.scalar_type()), factor.L), factor.scale,
                          factor.finite, X.scalar_type());
}

}  // namespace torchium::linalg::detail
