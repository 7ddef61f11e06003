#include "linalg/matrix_functions/direct_power.h"

#include "linalg/matrix_functions/matrix_functions.h"
#include "linalg/products/symmetric_storage.h"
#include "linalg/roots/device_newton.h"
#include "linalg/spectral/spectral.h"

#include <ATen/ATen.h>

#include <cmath>
#include <optional>

namespace torchium::linalg::detail {
namespace {

constexpr double kLargestInteger = 16;  // of the exponents: rounding errors add up

// p with exponent = -numerator / p, for p up to kLargestIteratedRoot.
std::optional<int64_t> inverse_root_order(double exponent, double numerator) {
  const double p = std::round(-numerator / exponent);
  const bool is_root = exponent < 0 && p >= 1 && p <= static_cast<double>(kLargestIteratedRoot) &&
                       std::abs(exponent * p + numerator) <= 1e-12 * numerator;
  return is_root ? std::make_optional(static_cast<int64_t>(p)) : std::nullopt;
}

at::Tensor inverse_root(const at::Tensor& A, int64_t p, double eps) {
  return device_inverse_root(A, p, eps, /*relative_eps=*/0.0).root;
}

// half + half^T within the range of the dtype.
at::Tensor symmetric_and_bounded(at::Tensor half) {
  const double limit = saturation(half.scalar_type());
  half.clamp_(-limit / 2, limit / 2);  // NaN stays
  return half + half.mT();
}

// X X, without overflow before the last multiplication.
at::Tensor product_with_itself(const at::Tensor& X) {
  const at::Tensor largest = X.abs().amax({-2, -1}, /*keepdim=*/true).mul_(X.size(-1));
  const at::Tensor exponent = std::get<1>(at::frexp(largest)).clamp_(-100, 126);
  const at::Tensor scale = at::ldexp(at::ones_like(largest), exponent);
  return symmetric_and_bounded(at::bmm(X / scale, X).mul_(scale * 0.5));
}

// D D^(-1/2) for D = A + eps I.
at::Tensor square_root(const at::Tensor& A, double eps) {
  const at::Tensor D = at::lerp(A, A.mT(), 0.5);
  D.diagonal(0, -2, -1).add_(eps);
  return symmetric_and_bounded(
      at::baddbmm(D, D, inverse_root(A, 2, eps), /*beta=*/0, /*alpha=*/0.5));
}

// By squarings, of a matrix that a power of two brings to a norm below one. eps = 0 or D within the
// range of its dtype.
at::Tensor integer_power(const at::Tensor& A, int64_t exponent, double eps) {
  Normalized input = normalize_symmetric(A, eps);
  input.matrix.diagonal(0, -2, -1).add_((input.scale * eps).unsqueeze(-1));
  const at::Tensor bound = input.matrix.abs().sum(-1).amax(-1);
  const at::Tensor unit = at::ldexp(at::ones_like(bound), -std::get<1>(at::frexp(bound)));
  at::Tensor square = input.matrix * unit.view({-1, 1, 1});
  at::Tensor power;
  for (int64_t rest = exponent; rest > 0; rest /= 2) {
    if (rest % 2 == 1) power = power.defined() ? at::bmm(power, square) : square;
    if (rest > 1) square = at::bmm(square, square);
  }
  if (!power.defined()) {
    power = at::eye(A.size(-1), A.options()).expand_as(A).contiguous();
  }
  // In two factors, powers of two that are normal numbers where the result is.
  const at::Tensor scale = input.scale * unit;
  const double smallest = smallest_normal(A.scalar_type());
  for (const int64_t part : {exponent / 2, exponent - exponent / 2}) {
    power = power * scale.pow(-static_cast<double>(part))
                        .clamp_(smallest, 1 / smallest)
                        .to(A.scalar_type())
                        .view({-1, 1, 1});
  }
  at::Tensor result = symmetric_and_bounded(power * 0.5);
  mark_non_finite(result, input.finite);
  return result;
}

}  // namespace

at::Tensor direct_power(const at::Tensor& A, double exponent, double eps) {
  if (A.numel() == 0) return {};
  const at::NoTF32Guard full_precision;
  if (exponent >= 0 && exponent <= kLargestInteger && std::floor(exponent) == exponent) {
    return integer_power(A, static_cast<int64_t>(exponent), eps);
  }
  if (const auto p = inverse_root_order(exponent, 1); p && has_device_root(A, *p)) {
    return inverse_root(A, *p, eps);
  }
  if (const auto p = inverse_root_order(exponent, 2); p && has_device_root(A, *p)) {
    return product_with_itself(inverse_root(A, *p, eps));
  }
  if (exponent == 0.5 && has_device_root(A, 2)) return square_root(A, eps);
  return {};
}

}  // namespace torchium::linalg::detail
