#include "linalg/spectral/unit_scale.h"

#include <ATen/ATen.h>

#include <limits>

namespace torchium::linalg::detail {

at::Tensor UnitScaled::or_nan(const at::Tensor& X) const {
  return X.masked_fill(finite.logical_not(), std::numeric_limits<double>::quiet_NaN());
}

UnitScaled unit_scaled(const at::Tensor& A) {
  const at::Tensor largest = A.abs().amax({-2, -1}, /*keepdim=*/true);
  const at::Tensor finite = largest.isfinite();
  // In two factors, each a normal number.
  const at::Tensor exponent = std::get<1>(at::frexp(at::where(finite, largest, 0.5)));
  const at::Tensor half = at::ldexp(at::ones_like(largest), -exponent.div(2, "floor"));
  const at::Tensor rest = at::ldexp(half, -exponent.remainder(2));
  return {at::where(finite, A, 0).mul_(half).mul_(rest), half * rest, finite};
}

}  // namespace torchium::linalg::detail
