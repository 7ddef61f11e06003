#include "linalg/bounded_solution.h"

#include <ATen/Dispatch.h>

#include <limits>

namespace torchium::linalg::detail {

at::Tensor restore_batch(const at::Tensor& x, at::IntArrayRef batch) {
  auto sizes = batch.vec();
  sizes.insert(sizes.end(), x.sizes().begin() + 1, x.sizes().end());
  return x.reshape(sizes);
}

at::Tensor bounded_solution(at::Tensor result, const at::Tensor& factor, const at::Tensor& finite,
                            at::ScalarType dtype) {
  const auto each_matrix = [](const at::Tensor& x) { return x.unsqueeze(-1).unsqueeze(-1); };
  const double largest = AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dtype, "bounded_solution",
      [] { return static_cast<double>(std::numeric_limits<scalar_t>::max()); });
  result.mul_(each_matrix(factor.to(result.scalar_type()))).clamp_(-largest, largest);
  if (!finite.is_cpu() || !finite.all().item().toBool()) {
    result.masked_fill_(each_matrix(finite.logical_not()),
                        std::numeric_limits<double>::quiet_NaN());
  }
  return result.to(dtype).contiguous();
}

}  // namespace torchium::linalg::detail
