#include "linalg/operators/dense_product.h"
#include "linalg/operators/operator_checks.h"
#include <torchium/linalg/linear_operator.h>

#include <ATen/ops/matmul.h>

#include <utility>

namespace torchium::linalg {

LinearOperator::LinearOperator(const at::Tensor& A)
    : n_(A.defined() && A.dim() == 2 ? A.size(0) : 0),
      product_([A](const at::Tensor& X) {
        return A.layout() == at::kStrided ? detail::dense_product(A, X) : at::matmul(A, X);
      }),
      is_dense_(A.defined() && A.layout() == at::kStrided),
      options_(A.defined() ? at::TensorOptions(A.scalar_type()).device(A.device())
                           : at::TensorOptions()) {
  TORCH_CHECK_VALUE(A.defined() && A.dim() == 2 && A.size(0) == A.size(1), "LinearOperator: A is ",
                    A.defined() ? at::str(A.sizes()) : "undefined",
                    "; it must be a square matrix.");
  detail::check_operator("LinearOperator", n_, options_);
}

LinearOperator::LinearOperator(int64_t n, Product product, const at::TensorOptions& options)
    : n_(n),
      product_(std::move(product)),
      options_(
          at::TensorOptions(c10::typeMetaToScalarType(options.dtype())).device(options.device())) {
  TORCH_CHECK_VALUE(product_ != nullptr, "LinearOperator: product is empty.");
  detail::check_operator("LinearOperator", n_, options_);
}

at::Tensor LinearOperator::matmul(const at::Tensor& X) const {
  TORCH_CHECK_VALUE(X.dim() == 2 && X.size(0) == n_, "LinearOperator: X is ", X.sizes(),
                    "; it must have ", n_, " rows.");
  at::Tensor Y = product_(X);
  detail::check_product(X, Y);
  return Y;
}

}  // namespace torchium::linalg
