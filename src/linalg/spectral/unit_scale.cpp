#include "linalg/spectral/unit_scale.h"

#include <ATen/ATen.h>

#include <limits>

namespace torchium::linalg::detail {

at::Tensor UnitScaled::or_nan(const at::Tensor& X) const {
  return at::where(finite, X, std::numeric_limits<double>::quiet_NaN());
}

UnitScaled unit_scaled(const at::Tensor& A) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor largest =
      at::linalg_vector_norm(A, kInfinity, at::IntArrayRef{-2, -1}, /*keepdim=*/true);
  const at::Tensor finite = largest < kInfinity;  // not for NaN
  const at::Tensor exponent = std::get<1>(at::frexp(at::where(finite, largest, 0.5)));
  return {times_power_of_two(at::where(finite, A, 0), -exponent), exponent, finite};
}

at::Tensor times_power_of_two(const at::Tensor& x, const at::Tensor& exponent) {
  if (x.scalar_type() == at::kFloat) {
    return (x * at::exp2(exponent.to(at::kDouble))).to(at::kFloat);
  }
  const at::Tensor half = exponent.div(2, "floor");
  const auto power = [](const at::Tensor& e) {
    return at::exp2(e.to(at::kDouble).clamp_(-1022, 1022));
  };
  return x * power(half) * power(exponent - half);
}

}  // namespace torchium::linalg::detail
