// Dense matrices and their factorised inverses.
#pragma once

#include "linalg/structured/operator_node.h"

namespace torchium::linalg::detail {

class DenseNode final : public NodeOf<DenseNode> {
 public:
  explicit DenseNode(const at::Tensor& A);
  at::Tensor multiply(const at::Tensor& X) const override;
  std::optional<at::Tensor> multiply_left(const at::Tensor& X) const override;
  LinearOperator transpose() const override;
  at::Tensor to_dense() const override { return A; }
  std::optional<at::Tensor> diag(const EstimateOptions&) const override;
  std::optional<Slogdet> slogdet(const EstimateOptions&) const override;
  std::optional<LinearOperator> apply(const MatrixFunction& f) const override;
  std::optional<Spectrum> spectrum() const override;
  std::optional<Eigensolution> eigen() const override;

  const at::Tensor A;
};

// A^-1 from L U = P A, or from L L^T = A if A is positive definite.
class FactorizedInverse final : public NodeOf<FactorizedInverse> {
 public:
  // f: the inverse, for messages.
  FactorizedInverse(const MatrixFunction& f, const LinearOperator& A, const at::Tensor& dense);
  at::Tensor multiply(const at::Tensor& X) const override;
  LinearOperator transpose() const override;
  bool is_symmetric() const override { return A_.is_symmetric(); }
  Property property() const override { return property_of(A_); }
  std::optional<Slogdet> slogdet(const EstimateOptions& options) const override;
  std::optional<LinearOperator> apply(const MatrixFunction& f) const override;

 private:
  LinearOperator A_;
  at::Tensor factor_, pivots_;  // no pivots: Cholesky
  bool transposed_ = false;
};

}  // namespace torchium::linalg::detail
