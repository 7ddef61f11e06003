// Integer powers of matrices, as products.
#pragma once

#include "linalg/structured/operator_node.h"

namespace torchium::linalg::detail {

// A^p for a small p >= 2: one column takes p products with A, where A^p itself takes as many of n.
class PowerNode final : public NodeOf<PowerNode> {
 public:
  PowerNode(const LinearOperator& A, int64_t p);
  at::Tensor multiply(const at::Tensor& X) const override;
  LinearOperator transpose() const override;
  at::Tensor to_dense() const override;
  bool is_symmetric() const override { return A_.is_symmetric(); }
  Property property() const override;
  std::optional<at::Tensor> diag(const EstimateOptions&) const override;
  std::optional<Slogdet> slogdet(const EstimateOptions& estimate) const override;
  std::optional<LinearOperator> apply(const MatrixFunction& f) const override;
  std::optional<Spectrum> spectrum() const override;
  std::optional<Eigensolution> eigen() const override;

 private:
  LinearOperator A_;
  int64_t p_;
};

}  // namespace torchium::linalg::detail
