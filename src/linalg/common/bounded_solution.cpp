#include "linalg/common/bounded_solution.h"

#include <ATen/Dispatch.h>

#include <limits>

namespace torchium::linalg::detail {

at::Tensor restore_batch(const at::Tensor& x, at::IntArrayRef batch) {
  auto sizes = batch.vec();
  sizes.insert(sizes.end(), x.sizes().begin() + 1, x.sizes().end());
  return x.reshape(sizes);
}

at::Tensor saturated(at::Tensor x, at::ScalarType dtype) {
  const double largest = AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dtype, "saturated",
      [] { return static_cast<double>(std::numeric_limits<scalar_t>::max()); });
  return x.clamp_(-largest, largest).to(dtype);
}

at::Tensor bounded_solution(at::Tensor result, const at::Tensor& factor, const at::Tensor& finite,
                            at::ScalarType dtype) {
  const auto each_matrix = [](const at::Tensor& x) { return x.unsqueeze(-1).unsqueeze(-1); };
  at::Tensor bounded = saturated(result.mul_(each_matrix(factor.to(result.scalar_type()))), dtype);
  if (!finite.is_cpu() || !finite.all().item().toBool()) {
    bounded.masked_fill_(each_matrix(finite.logical_not()),
                         std::numeric_limits<double>::quiet_NaN());
  }
  return bounded.contiguous();
}

}  // namespace torchium::linalg::detail
