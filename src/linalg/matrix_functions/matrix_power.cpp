#include "linalg/matrix_functions/direct_power.h"
#include "linalg/matrix_functions/matrix_functions.h"
#include "linalg/spectral/spectral.h"

#include <ATen/ATen.h>

#include <cmath>

namespace torchium::linalg::detail {
namespace {

// Whether x^exponent is defined for negative x too. Other exponents assume a semi-definite A.
bool is_polynomial(double exponent) { return exponent >= 0 && std::floor(exponent) == exponent; }

// (x^e - y^e) / (x - y) for x and y of one sign, or zero, without cancellation: with b the larger
// magnitude and r = (smaller - b) / b it is b^(e-1) ((1 + r)^e - 1) / r.
at::Tensor same_sign_difference(const at::Tensor& x, const at::Tensor& y, double exponent) {
  const at::Tensor larger = at::maximum(x.abs(), y.abs());
  const at::Tensor r = at::minimum(x.abs(), y.abs()).sub_(larger).div_(larger);
  const at::Tensor slope = at::where(r == 0, exponent, r.log1p().mul_(exponent).expm1_() / r);
  at::Tensor result = larger.pow(exponent - 1).mul_(slope);
  if (exponent > 0) {
    result = at::where(larger == 0, exponent == 1 ? 1.0 : 0.0, result);
  }
  const bool odd = std::fmod(exponent, 2.0) == 0.0;  // of the power e - 1
  return odd ? at::where(at::minimum(x, y) < 0, -result, result) : result;
}

// Divided differences of the eigenvalue function of matrix_power, [N, n, n]; the derivative where
// eigenvalues coincide.
at::Tensor divided_differences(const at::Tensor& values, const at::Tensor& floor, double exponent) {
  const at::Tensor x = values.unsqueeze(-1);
  const at::Tensor y = values.unsqueeze(-2);
  if (is_polynomial(exponent)) {
    const at::Tensor apart = (x.pow(exponent) - y.pow(exponent)).div_(x - y);
    return at::where(x * y < 0, apart, same_sign_difference(x, y, exponent));
  }
  // The function is constant below its floor: chain rule of max(x, floor).
  const at::Tensor bound = floor.view({-1, 1, 1});
  const at::Tensor above_x = at::maximum(x, bound);
  const at::Tensor above_y = at::maximum(y, bound);
  const at::Tensor inner =
      at::where(x == y, (x > bound).to(at::kDouble), (above_x - above_y).div_(x - y));
  return same_sign_difference(above_x, above_y, exponent).mul_(inner);
}

}  // namespace

MatrixPower matrix_power_with_eigensystem(const at::Tensor& A, double exponent, double eps,
                                          double relative_eps) {
  const Normalized input = normalize_symmetric(as_batch(A), eps);
  const DampedSpectrum spectrum = damped_spectrum(input, eps, relative_eps);
  at::Tensor base = spectrum.values;
  if (exponent < 0) {
    base = at::maximum(base, spectrum.floor.unsqueeze(-1));
  } else if (!is_polynomial(exponent)) {
    base = base.clamp_min(0);
  }
  const double limit = saturation(A.scalar_type());
  const at::Tensor scale = input.scale.unsqueeze(-1);
  const at::Tensor f = power_(base / scale, exponent).clamp_(-limit, limit);
  const bool may_be_negative = exponent > 0 && std::fmod(exponent, 2.0) == 1.0;
  MatrixPower result{compose(spectrum.vectors, f, /*non_negative=*/!may_be_negative),
                     spectrum.values / scale, spectrum.vectors};
  mark_non_finite(result.power, input.finite);
  mark_non_finite(result.values, input.finite);
  result.power = result.power.view(A.sizes());
  result.values = result.values.view(A.sizes().slice(0, A.dim() - 1));
  result.vectors = result.vectors.view(A.sizes());
  return result;
}

at::Tensor matrix_power(const at::Tensor& A, double exponent, double eps, double relative_eps) {
  // relative_eps is in units of an eigenvalue.
  if (relative_eps == 0) {
    const at::Tensor power = direct_power(as_batch(A), exponent, eps);
    if (power.defined()) return power.view(A.sizes());
  }
  return matrix_power_with_eigensystem(A, exponent, eps, relative_eps).power;
}

namespace {

// Q (K o Q^T X Q) Q^T for the symmetric part of X, plus the contribution of the damping, which
// moves with the largest eigenvalue, to the inner matrix [N, n, n] before and after the product
// with K.
template <typename Before, typename After>
at::Tensor through_eigenbasis(const at::Tensor& X, const at::Tensor& values,
                              const at::Tensor& vectors, double exponent, const Before& before,
                              const After& after) {
  if (exponent == 0 || X.numel() == 0) {
    return at::zeros_like(X, at::MemoryFormat::Contiguous);
  }
  const at::NoTF32Guard full_precision;
  const at::ScalarType dtype = vectors.scalar_type();
  const at::Tensor Q = as_batch(vectors);
  const at::Tensor direction = as_batch(X);
  const at::Tensor damped = values.reshape({-1, X.size(-1)});
  const at::Tensor floor =
      spectral_floor(damped, dtype, at::full({}, smallest_normal(dtype), damped.options()));
  const double limit = saturation(dtype);
  const at::Tensor slopes =
      divided_differences(damped, floor, exponent).clamp_(-limit, limit).to(dtype);
  const at::Tensor symmetric = (direction + direction.mT()).mul_(0.5);
  at::Tensor inner = at::matmul(Q.mT(), at::matmul(symmetric, Q));
  const at::Tensor largest_is_positive = damped.select(-1, -1) > 0;
  before(inner, largest_is_positive);
  inner.mul_(slopes);
  after(inner, largest_is_positive);
  const at::Tensor result = at::matmul(Q, at::matmul(inner, Q.mT()));
  return (result + result.mT()).mul_(0.5).view(X.sizes());
}

void no_change(at::Tensor&, const at::Tensor&) {}

// The last entry of the diagonals of [N, n, n]: that of the largest eigenvalue.
at::Tensor last_entry(const at::Tensor& inner) { return inner.select(-1, -1).select(-1, -1); }

}  // namespace

at::Tensor matrix_power_backward(const at::Tensor& grad, const at::Tensor& values,
                                 const at::Tensor& vectors, double exponent, double relative_eps) {
  return through_eigenbasis(grad, values, vectors, exponent, no_change,
                            [=](at::Tensor& inner, const at::Tensor& largest_is_positive) {
                              if (relative_eps == 0) return;
                              const at::Tensor trace = inner.diagonal(0, -2, -1).sum(-1);
                              last_entry(inner).add_(trace * largest_is_positive, relative_eps);
                            });
}

at::Tensor matrix_power_forward(const at::Tensor& tangent, const at::Tensor& values,
                                const at::Tensor& vectors, double exponent, double relative_eps) {
  return through_eigenbasis(
      tangent, values, vectors, exponent,
      [=](at::Tensor& inner, const at::Tensor& largest_is_positive) {
        if (relative_eps == 0) return;
        const at::Tensor moved = last_entry(inner) * largest_is_positive * relative_eps;
        inner.diagonal(0, -2, -1).add_(moved.unsqueeze(-1));
      },
      no_change);
}

}  // namespace torchium::linalg::detail
