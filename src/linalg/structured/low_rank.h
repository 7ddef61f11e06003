// diag(d) + U V^T.
#pragma once

#include "linalg/structured/operator_node.h"

#include <memory>

namespace torchium::linalg::detail {

class LowRankNode final : public NodeOf<LowRankNode> {
 public:
  // symmetric: U V^T is.
  LowRankNode(const at::Tensor& d, const at::Tensor& U, const at::Tensor& V, bool symmetric);
  at::Tensor multiply(const at::Tensor& X) const override;
  LinearOperator transpose() const override;
  at::Tensor to_dense() const override;
  bool is_symmetric() const override { return symmetric_; }
  Property property() const override;
  std::optional<at::Tensor> diag(const EstimateOptions&) const override;
  std::optional<Slogdet> slogdet(const EstimateOptions&) const override;
  std::optional<LinearOperator> apply(const MatrixFunction& f) const override;

  LinearOperator plus_diagonal(const at::Tensor& e) const;

 private:
  std::shared_ptr<LowRankNode> woodbury() const;
  bool is_inaccurate(const std::shared_ptr<LowRankNode>& inverse) const;
  bool has_zero() const;           // in d
  at::Tensor capacitance() const;  // I + V^T D^-1 U
  at::Tensor d_, U_, V_;
  bool symmetric_;
};

}  // namespace torchium::linalg::detail
