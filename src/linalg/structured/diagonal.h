// Diagonal matrices, and multiples of the identity.
#pragma once

#include "linalg/structured/operator_node.h"

namespace torchium::linalg::detail {

class DiagonalNode final : public NodeOf<DiagonalNode> {
 public:
  explicit DiagonalNode(const at::Tensor& d);
  at::Tensor multiply(const at::Tensor& X) const override;
  std::optional<at::Tensor> multiply_left(const at::Tensor& X) const override;
  LinearOperator transpose() const override;
  at::Tensor to_dense() const override;
  bool is_symmetric() const override { return true; }
  Property property() const override;
  std::optional<at::Tensor> diag(const EstimateOptions&) const override { return d; }
  std::optional<Slogdet> slogdet(const EstimateOptions&) const override;
  std::optional<LinearOperator> apply(const MatrixFunction& f) const override;
  std::optional<Spectrum> spectrum() const override;

  // Made of one number, c.expand(n): a multiple of the identity with a derivative.
  bool is_uniform() const { return d.dim() == 1 && n > 1 && d.stride(0) == 0; }

  const at::Tensor d;  // [..., n]
};

class IdentityNode final : public NodeOf<IdentityNode> {
 public:
  IdentityNode(int64_t n, double scale, const at::TensorOptions& options);
  at::Tensor multiply(const at::Tensor& X) const override;
  std::optional<at::Tensor> multiply_left(const at::Tensor& X) const override;
  LinearOperator transpose() const override;
  at::Tensor to_dense() const override;
  bool is_symmetric() const override { return true; }
  Property property() const override;
  std::optional<at::Tensor> diag(const EstimateOptions&) const override;
  std::optional<Slogdet> slogdet(const EstimateOptions&) const override;
  std::optional<LinearOperator> apply(const MatrixFunction& f) const override;
  std::optional<Spectrum> spectrum() const override;

  const double scale;
};

}  // namespace torchium::linalg::detail
