#include "linalg/operators/operator_process.h"

#include "linalg/common/operator_checks.h"
#include "support/no_autocast.h"
#include "support/tensor_version.h"

#include <c10/core/GradMode.h>

namespace torchium::linalg::detail {

using torchium::detail::NoAutocast;
using torchium::detail::version_of;

at::Tensor OperatorProcess::operand() {
  if (!operand_.defined()) {
    const c10::NoGradGuard no_grad;
    const NoAutocast no_autocast;
    operand_ = next_operand();
    version_ = operand_.defined() ? version_of(operand_) : 0;
  }
  return operand_;
}

void OperatorProcess::accept(const at::Tensor& product) {
  const at::Tensor X = operand();
  TORCH_CHECK(X.defined(), "No product is missing.");
  check_product(X, product);
  check_unchanged(X, version_);
  const c10::NoGradGuard no_grad;
  const NoAutocast no_autocast;
  products_ += X.size(1);
  operand_.reset();
  use(X, product.detach());
}

std::vector<at::Tensor> OperatorProcess::result() {
  TORCH_CHECK(!operand().defined(), "Products with the operator are missing.");
  const NoAutocast no_autocast;
  return make_result();
}

std::vector<at::Tensor> OperatorProcess::run(const LinearOperator& A) {
  const LinearOperator matrix = prepared(A);
  for (at::Tensor X = operand(); X.defined(); X = operand()) {
    accept(matrix.matmul(X));
  }
  return result();
}

}  // namespace torchium::linalg::detail
