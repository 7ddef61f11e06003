#include "linalg/structured/power.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::linalg::detail {

PowerNode::PowerNode(const LinearOperator& A, int64_t p)
    : NodeOf("Power", A.node().batch, A.size(), A.options()), A_(A), p_(p) {}

at::Tensor PowerNode::multiply(const at::Tensor& X) const {
  at::Tensor Y = X;
  for (int64_t i = 0; i < p_; ++i) {
    Y = A_.node().multiply(Y);
  }
  return Y;
}

LinearOperator PowerNode::transpose() const { return make_operator<PowerNode>(A_.transpose(), p_); }

at::Tensor PowerNode::to_dense() const {
  return n <= kLargestDenseOrder ? at::linalg_matrix_power(A_.to_dense(), p_)
                                 : OperatorNode::to_dense();
}

Property PowerNode::property() const {
  const Property p = property_of(A_);
  return p == Property::kSymmetric && p_ % 2 == 0 ? Property::kPositiveSemidefinite : p;
}

std::optional<at::Tensor> PowerNode::diag(const EstimateOptions& estimate) const {
  if (estimate.num_samples || n > kLargestDenseOrder) {
    return std::nullopt;
  }
  return to_dense().diagonal(0, -2, -1);
}

std::optional<Slogdet> PowerNode::slogdet(const EstimateOptions& estimate) const {
  const Slogdet found = slogdet_of(A_, estimate);
  return Slogdet{found.sign.pow(p_), static_cast<double>(p_) * found.logabsdet};
}

// (A^p)^q = A^(p q) for integers.
std::optional<LinearOperator> PowerNode::apply(const MatrixFunction& f) const {
  MatrixFunction of_base = f;
  of_base.exponent = static_cast<double>(p_) * f.exponent.value_or(0.5);
  return f.is_integer_power() && of_base.is_integer_power()
             ? std::make_optional(detail::apply(A_, of_base))
             : std::nullopt;
}

std::optional<Spectrum> PowerNode::spectrum() const {
  auto found = spectrum_of(A_);
  return found ? std::make_optional(Spectrum{found->values.pow(p_), found->vectors}) : std::nullopt;
}

std::optional<Eigensolution> PowerNode::eigen() const {
  auto found = eigen_of(A_);
  return found ? std::make_optional(Eigensolution{found->values.pow(p_), found->vectors})
               : std::nullopt;
}

}  // namespace torchium::linalg::detail
