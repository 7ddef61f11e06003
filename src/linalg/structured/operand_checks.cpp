#include "linalg/structured/operand_checks.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

namespace torchium::linalg::detail {

const at::Tensor& checked_operand(const char* kind, const char* name, const at::Tensor& operand,
                                  int64_t dim) {
  TORCH_CHECK_VALUE(operand.defined(), kind, ": ", name, " is undefined.");
  TORCH_CHECK_VALUE(operand.layout() == at::kStrided, kind, ": ", name, " is a tensor of layout ",
                    operand.layout(), "; it must be dense. Sparse takes sparse matrices.");
  TORCH_CHECK_VALUE(operand.scalar_type() == at::kFloat || operand.scalar_type() == at::kDouble,
                    kind, ": ", name, " is ", c10::getDtypeNames(operand.scalar_type()).first,
                    "; it must be float32 or float64.");
  TORCH_CHECK_VALUE(operand.dim() >= dim, kind, ": ", name, " is ", operand.sizes(),
                    "; it must have at least ", dim, " dimension(s).");
  TORCH_CHECK_VALUE(operand.size(-1) > 0, kind, ": ", name, " is ", operand.sizes(),
                    "; its last dimension must not be empty.");
  return operand;
}

const at::Tensor& checked_matrix(const char* kind, const at::Tensor& A) {
  TORCH_CHECK_VALUE(A.defined() && A.dim() >= 2 && A.size(-1) == A.size(-2), kind, ": A is ",
                    A.defined() ? at::str(A.sizes()) : "undefined",
                    "; it must be a square matrix, or a batch of square matrices.");
  return checked_operand(kind, "A", A, 2);
}

std::vector<int64_t> batch_of(const at::Tensor& operand, int64_t dim) {
  return operand.sizes().slice(0, operand.dim() - dim).vec();
}

at::TensorOptions options_of(const at::Tensor& operand) {
  return at::TensorOptions(operand.scalar_type()).device(operand.device());
}

const std::vector<LinearOperator>& checked_operators(const char* kind, const char* name,
                                                     const std::vector<LinearOperator>& operators,
                                                     bool any_order) {
  TORCH_CHECK_VALUE(!operators.empty(), kind, ": ", name, " is empty; pass at least one operator.");
  const LinearOperator& first = operators[0];
  for (size_t i = 1; i < operators.size(); ++i) {
    const LinearOperator& A = operators[i];
    TORCH_CHECK_VALUE(A.options().dtype() == first.options().dtype() &&
                          A.options().device() == first.options().device(),
                      kind, ": ", name, "[", i, "] is ",
                      at::typeMetaToScalarType(A.options().dtype()), " on ", A.options().device(),
                      ", ", name, "[0] ", at::typeMetaToScalarType(first.options().dtype()), " on ",
                      first.options().device(), "; they must be of one dtype and on one device.");
    TORCH_CHECK_VALUE(any_order || A.size() == first.size(), kind, ": ", name, "[", i,
                      "] is of order ", A.size(), ", ", name, "[0] of order ", first.size(),
                      "; the orders must be equal.");
  }
  common_batch(operators);
  return operators;
}

std::vector<int64_t> common_batch(const std::vector<LinearOperator>& operators) {
  std::vector<int64_t> common;
  for (const LinearOperator& A : operators) {
    common = at::infer_size(common, A.node().batch);
  }
  return common;
}

}  // namespace torchium::linalg::detail
