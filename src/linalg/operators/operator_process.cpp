#include "linalg/operators/operator_process.h"

#include "linalg/common/operator_checks.h"
#include "support/derivatives.h"
#include "support/no_autocast.h"
#include "support/no_transforms.h"
#include "support/phase.h"
#include "support/tensor_version.h"

#include <c10/core/GradMode.h>

namespace torchium::linalg::detail {

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
