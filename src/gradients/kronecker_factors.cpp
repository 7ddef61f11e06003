#include "gradients/kronecker_factors.h"

#include "gradients/patches.h"
#include "linalg/symmetric_update.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace torchium::gradients::detail {
namespace {

void check_factor(const at::Tensor& factor, const char* name, int64_t groups, int64_t order,
                  bool with_bias, const at::Tensor& input) {
  const auto sizes = factor.sym_sizes();
  const bool fits = (sizes.size() == 3 || sizes.size() == 2) && sizes[0] == groups &&
                    sizes[1] == sizes.back() &&
                    (sizes[1] == order || (with_bias && sizes[1] == order + 1));
  TORCH_CHECK_VALUE(fits, name, " has shape ", sizes, "; it must be [", groups, ", ", order, ", ",
                    order, "] or its diagonal [", groups, ", ", order, "]",
                    with_bias ? ", or one row and column more for a bias" : "");
  TORCH_CHECK_VALUE(factor.scalar_type() == at::kFloat || factor.scalar_type() == at::kDouble, name,
                    " has dtype ", factor.scalar_type(), "; it must be float32 or float64");
  TORCH_CHECK_VALUE(factor.is_contiguous() && factor.device() == input.device(), name,
                    " must be contiguous and on ", input.device(), ", like the input");
}

// The diagonal of what second_moment_() adds up, [groups, vector].
void squares_(at::Tensor& sum, const at::Tensor& X, bool accumulate) {
  if (!accumulate) {
    sum.zero_();
  }
  sum.narrow(1, 0, X.size(1)).add_(X.square().sum(2));
  if (sum.size(1) > X.size(1)) {
    sum.select(1, X.size(1)).add_(X.size(2));
  }
}

// sum[g] <- X[g] X[g]^T, plus sum[g] to accumulate, with X: [groups, vector, count], each vector
// with a 1 at its end where `sum` has room for it.
void second_moment_(at::Tensor& sum, const at::Tensor& X, bool accumulate) {
  if (sum.dim() == 2) {
    squares_(sum, X, accumulate);
    return;
  }
  const int64_t length = X.size(1);
  const double beta = accumulate ? 1.0 : 0.0;
  at::Tensor inner = sum.narrow(1, 0, length).narrow(2, 0, length);
  linalg::detail::symmetric_update_(inner, X, beta, 1.0);
  if (sum.size(1) > length) {
    at::Tensor row = sum.select(1, length).narrow(1, 0, length);
    at::Tensor corner = sum.select(1, length).select(1, length);
    if (!accumulate) {
      row.zero_();
      corner.zero_();
    }
    row.add_(X.sum(2));
    sum.select(2, length).narrow(1, 0, length).copy_(row);
    corner.add_(X.size(2));
  }
}

}  // namespace

void check_kronecker_factors(const at::Tensor& A_sum, const at::Tensor& G_sum, const LayerUse& use,
                             at::IntArrayRef weight_shape) {
  check_use_tensors(use, 0);
  const WeightGeometry weight = weight_geometry(use, weight_shape, 0);
  check_factor(A_sum, "A_sum", weight.groups, weight.fan_in, /*with_bias=*/true, use.input);
  check_factor(G_sum, "G_sum", weight.groups, weight.fan_out, /*with_bias=*/false, use.input);
  TORCH_CHECK_VALUE(A_sum.scalar_type() == G_sum.scalar_type(), "A_sum has dtype ",
                    A_sum.scalar_type(), " and G_sum ", G_sum.scalar_type(),
                    "; they must have the same");
}

void update_kronecker_factors_(at::Tensor& A_sum, at::Tensor& G_sum, const LayerUse& use,
                               at::IntArrayRef weight_shape, bool accumulate) {
  c10::NoGradGuard no_grad;
  check_kronecker_factors(A_sum, G_sum, use, weight_shape);
  const WeightGeometry weight = weight_geometry(use, weight_shape, 0);
  if (use.input.numel() == 0) {
    if (!accumulate) {
      A_sum.zero_();
      G_sum.zero_();
    }
    return;
  }
  const PositionSource source(use, weight, A_sum.scalar_type());
  for (int64_t first = 0; first < source.samples(); first += source.piece()) {
    const int64_t count = std::min(source.piece(), source.samples() - first);
    const auto [A, G] = source.of_samples(first, count);
    second_moment_(A_sum, A.flatten(1, 2).mT(), accumulate || first > 0);
    second_moment_(G_sum, G.flatten(1, 2).mT(), accumulate || first > 0);
  }
}

}  // namespace torchium::gradients::detail
