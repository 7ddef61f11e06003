#include "linalg/structured/dense.h"

#include "linalg/structured/dense_product.h"
#include "linalg/structured/iterative/function_of_values.h"
#include "linalg/structured/operand_checks.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>

namespace torchium::linalg::detail {

DenseNode::DenseNode(const at::Tensor& A)
    : NodeOf("Dense", batch_of(A, 2), A.size(-1), options_of(A)), A(A) {}

at::Tensor DenseNode::multiply(const at::Tensor& X) const {
  return A.dim() == 2 && X.dim() == 2 ? dense_product(A, X) : A.matmul(X);
}

std::optional<at::Tensor> DenseNode::multiply_left(const at::Tensor& X) const {
  return dense_product_from_left(X, A);
}

LinearOperator DenseNode::transpose() const { return make_operator<DenseNode>(A.mT()); }

std::optional<at::Tensor> DenseNode::diag(const EstimateOptions&) const {
  return A.diagonal(0, -2, -1);
}

std::optional<Slogdet> DenseNode::slogdet(const EstimateOptions&) const {
  if (assumed == Property::kPositiveDefinite) {
    const auto [L, info] = at::linalg_cholesky_ex(A);
    if (!info.gt(0).any().item<bool>()) {
      return Slogdet{at::ones(batch, options),
                     2 * L.diagonal(0, -2, -1).log().sum(at::IntArrayRef{-1})};
    }
  }
  const auto [sign, logabsdet] = at::linalg_slogdet(A);
  return Slogdet{sign, logabsdet};
}

std::optional<LinearOperator> DenseNode::apply(const MatrixFunction& f) const {
  if (f.is_power_of_few_factors()) {
    return std::nullopt;
  }
  const bool symmetric = assumed >= Property::kSymmetric;
  if (f.is_inverse()) {
    return make_operator<FactorizedInverse>(f, with_property(make_operator<DenseNode>(A), assumed),
                                            A);
  }
  return with_property(make_operator<DenseNode>(function_of_dense(kind, f, A, symmetric)),
                       f.exponent || !symmetric ? assumed : Property::kPositiveDefinite);
}

std::optional<Spectrum> DenseNode::spectrum() const {
  if (assumed < Property::kSymmetric) {
    return std::nullopt;
  }
  const auto [values, V] = symmetric_eigensystem_of(A);
  return Spectrum{values, make_operator<DenseNode>(V)};
}

std::optional<Eigensolution> DenseNode::eigen() const {
  const auto [values, V] =
      assumed >= Property::kSymmetric ? symmetric_eigensystem_of(A) : at::linalg_eig(A);
  return Eigensolution{values,
                       [V = V](const at::Tensor& indices) { return V.index_select(1, indices); }};
}

FactorizedInverse::FactorizedInverse(const MatrixFunction& f, const LinearOperator& A,
                                     const at::Tensor& dense)
    : NodeOf("Inverse", batch_of(dense, 2), dense.size(-1), options_of(dense)), A_(A) {
  at::Tensor info;
  if (property_of(A) == Property::kPositiveDefinite) {
    std::tie(factor_, info) = at::linalg_cholesky_ex(dense);
    TORCH_CHECK_VALUE(!info.gt(0).any().item<bool>(), A.node().kind, ".", f.name,
                      ": the matrix is assumed to be positive definite, but it is not. Add "
                      "a multiple of the identity, or do not assume it.");
    return;
  }
  std::tie(factor_, pivots_, info) = at::linalg_lu_factor_ex(dense);
  if (info.gt(0).any().item<bool>()) {
    throw_singular(A.node().kind, f, "a pivot is zero");
  }
}

at::Tensor FactorizedInverse::multiply(const at::Tensor& X) const {
  if (!pivots_.defined()) {
    // L L^T x = b; at::cholesky_solve copies L.
    const at::Tensor Y = at::linalg_solve_triangular(factor_, X, /*upper=*/false);
    return at::linalg_solve_triangular(factor_.mT(), Y, /*upper=*/true);
  }
  return at::linalg_lu_solve(factor_, pivots_, X, /*left=*/true, /*adjoint=*/transposed_);
}

LinearOperator FactorizedInverse::transpose() const {
  auto copy = std::make_shared<FactorizedInverse>(*this);
  copy->transposed_ = !transposed_;
  copy->A_ = A_.transpose();
  return LinearOperator(std::move(copy));
}

std::optional<Slogdet> FactorizedInverse::slogdet(const EstimateOptions& options) const {
  const Slogdet found = slogdet_of(A_, options);
  return Slogdet{found.sign, -found.logabsdet};
}

std::optional<LinearOperator> FactorizedInverse::apply(const MatrixFunction& f) const {
  return f.is_positive_integer_power() ? std::nullopt : apply_to_inverse(A_, f);  // factors once
}

}  // namespace torchium::linalg::detail

namespace torchium::linalg {

Dense::Dense(const at::Tensor& A)
    : LinearOperator(detail::make_operator<detail::DenseNode>(detail::checked_matrix("Dense", A))) {
}

}  // namespace torchium::linalg
