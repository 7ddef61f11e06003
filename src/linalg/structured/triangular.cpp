// Triangular matrices, and their inverses by substitution.
#include "linalg/structured/dense_product.h"
#include "linalg/structured/iterative/function_of_values.h"
#include "linalg/structured/operand_checks.h"
#include "linalg/structured/operator_node.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>

namespace torchium::linalg::detail {
namespace {

class TriangularNode final : public NodeOf<TriangularNode> {
 public:
  // A: triangular; `inverted`: its inverse.
  TriangularNode(const at::Tensor& A, bool lower, bool inverted)
      : NodeOf(inverted ? "Inverse" : "Triangular", batch_of(A, 2), A.size(-1), options_of(A)),
        A_(A),
        lower_(lower),
        inverted_(inverted) {}

  at::Tensor multiply(const at::Tensor& X) const override {
    return inverted_ ? at::linalg_solve_triangular(A_, X, /*upper=*/!lower_) : A_.matmul(X);
  }

  std::optional<at::Tensor> multiply_left(const at::Tensor& X) const override {
    return inverted_ ? std::nullopt : dense_product_from_left(X, A_);
  }

  at::Tensor to_dense() const override { return inverted_ ? OperatorNode::to_dense() : A_; }

  LinearOperator transpose() const override {
    return make_operator<TriangularNode>(A_.mT(), !lower_, inverted_);
  }

  std::optional<at::Tensor> diag(const EstimateOptions&) const override {
    const at::Tensor d = A_.diagonal(0, -2, -1);
    return inverted_ ? d.reciprocal() : d;
  }

  std::optional<Slogdet> slogdet(const EstimateOptions& estimate) const override {
    const at::Tensor d = *diag(estimate);
    return Slogdet{d.sign().prod(-1), d.abs().log().sum(at::IntArrayRef{-1})};
  }

  std::optional<LinearOperator> apply(const MatrixFunction& f) const override {
    if (f.is_inverse()) {
      if (!inverted_ && A_.detach().diagonal(0, -2, -1).eq(0).any().item<bool>()) {
        throw_singular(kind, f, "an entry of the diagonal is zero");
      }
      return make_operator<TriangularNode>(A_, lower_, !inverted_);
    }
    if (f.is_power_of_few_factors()) {
      return std::nullopt;
    }
    // Functions of a triangular matrix are triangular.
    const at::Tensor image = function_of_dense(kind, f, to_dense(), /*symmetric=*/false);
    return Triangular(image, lower_);
  }

  std::optional<Eigensolution> eigen() const override { return eigen_of(Dense(to_dense())); }

 private:
  at::Tensor A_;
  bool lower_, inverted_;
};

LinearOperator make_triangular(const at::Tensor& A, bool lower) {
  return make_operator<TriangularNode>(lower ? A.tril() : A.triu(), lower, /*inverted=*/false);
}

}  // namespace
}  // namespace torchium::linalg::detail

namespace torchium::linalg {

Triangular::Triangular(const at::Tensor& A, bool lower)
    : LinearOperator(detail::make_triangular(detail::checked_matrix("Triangular", A), lower)) {}

}  // namespace torchium::linalg
