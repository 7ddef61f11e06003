#include "linalg/operators/operator_process.h"

#include "linalg/common/operator_checks.h"
#include "linalg/spectral/unit_scale.h"
#include "support/derivatives.h"
#include "support/no_autocast.h"
#include "support/no_transforms.h"
#include "support/phase.h"
#include "support/tensor_version.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <cstdlib>
#include <string_view>

namespace torchium::linalg::detail {

at::Tensor OperatorProcess::in_units(const at::Tensor& product) {
  if (product.scalar_type() != at::kDouble) {
    return product;
  }
  if (!exponent_) {
    constexpr int kHarmless = 300;  // the range is 2^-1074 to 2^1024
    const double largest = product.abs().max().item<double>();
    const int exponent = std::isfinite(largest) && largest > 0 ? std::ilogb(largest) : 0;
    exponent_ = std::abs(exponent) > kHarmless ? exponent : 0;
  }
  return *exponent_ == 0 ? product
                         : times_power_of_two(product, at::full({}, -*exponent_, at::kInt));
}

void OperatorProcess::multiply(const LinearOperator& A, const at::Tensor& X) {
  const int64_t version = torchium::detail::version_of(X);
  const at::Tensor product = this->product(A, X);
  check_product(X, product);
  check_unchanged(X, version);
  TORCH_CHECK_VALUE(!torchium::detail::is_differentiated(product), "The operator's product ",
                    torchium::detail::has_any_tangent(product) ? "has a tangent" : "requires grad",
                    ", but eigenpairs and estimates are not differentiable. Use torch.no_grad(), "
                    "or detach the tensors that the operator is made of.");
  TORCH_CHECK_VALUE(!torchium::detail::is_batched(product),
                    "The operator's product is batched by torch.vmap, but eigenpairs and estimates "
                    "take one matrix. Call them for one matrix after the other.");
  const c10::NoGradGuard no_grad;
  const torchium::detail::NoTransforms no_transforms;
  products_ += X.size(1);
  use(X, torchium::detail::levels_of(product).back().detach());
}

std::vector<at::Tensor> OperatorProcess::run(const LinearOperator& A) {
  const torchium::detail::Phase phase(phase_);
  const torchium::detail::NoAutocast no_autocast;
  const std::string_view name(phase_);
  TORCH_CHECK_VALUE(A.sizes().size() == 2, name.substr(name.rfind(':') + 1), ": A is ",
                    at::IntArrayRef(A.sizes()),
                    ", a batch of matrices; take them one after the other.");
  const LinearOperator matrix = prepared(A);
  const auto next = [&] {
    const c10::NoGradGuard no_grad;
    const torchium::detail::NoTransforms no_transforms;
    return next_operand();
  };
  for (at::Tensor X = next(); X.defined(); X = next()) {
    multiply(matrix, X);
  }
  const torchium::detail::NoTransforms no_transforms;
  return make_result();
}

}  // namespace torchium::linalg::detail
