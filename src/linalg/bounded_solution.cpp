#include "linalg/bounded_solution.h"

#include <ATen/Dispatch.h>

#include <limits>

namespace torchium::linalg::detail {

at::Tensor restore_batch(const at::Tensor& x, at::IntArrayRef batch) {
  auto sizes = batch.vec();
  sizes.insert(sizes.end(), x.sizes().begin() + 1, x.sizes().end());
  return x.reshape(sizes);
}

at::Tensor bounded_solution(const at::Tensor& result, const at::Tensor& factor,
                            const at::Tensor& finite, at::ScalarType dtype) {
  const auto each_matrix = [](const at::Tensor& x) { return x.unsqueeze(-1).unsqueeze(-1); };
  const double largest = AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dtype, "bounded_solution",
      [] { return static_cast<double>(std::numeric_limits<scalar_t>::max()); });
  return result.mul(each_matrix(factor.to(result.scalar_type())))
      .clamp_(-largest, largest)
      .masked_fill_(each_matrix(finite.logical_not()), std::numeric_limits<double>::quiet_NaN())
      .to(dtype)
      .contiguous();
}

}  // namespace torchium::linalg::detail
