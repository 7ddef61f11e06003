// Sums and multiples of matrices.
#include "linalg/structured/dense.h"
#include "linalg/structured/diagonal.h"
#include "linalg/structured/low_rank.h"
#include "linalg/structured/operand_checks.h"
#include "linalg/structured/operator_node.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace torchium::linalg::detail {
namespace {

class SumNode final : public NodeOfParts<SumNode> {
 public:
  explicit SumNode(const std::vector<LinearOperator>& terms)
      : NodeOfParts("Sum", terms[0].size(), terms, common_batch(terms)) {
    for (const LinearOperator& A : terms) {
      if (const auto* identity = node_as<IdentityNode>(A)) {
        shift_ += identity->scale;
      } else if (const auto* diagonal = node_as<DiagonalNode>(A);
                 diagonal && diagonal->is_uniform()) {
        const at::Tensor c = diagonal->d.select(0, 0);
        tensor_shift_ = tensor_shift_.defined() ? tensor_shift_ + c : c;
      } else {
        rest_.push_back(A);
      }
    }
  }

  at::Tensor multiply(const at::Tensor& X) const override {
    return total([&](const LinearOperator& A) { return A.node().multiply(X); });
  }

  at::Tensor to_dense() const override {
    return total([](const LinearOperator& A) { return A.to_dense(); });
  }

  Property property() const override {
    Property lowest = Property::kPositiveDefinite, highest = Property::kNone;
    for (const LinearOperator& A : parts_) {
      const Property p = property_of(A);
      lowest = std::min(lowest, p);
      highest = std::max(highest, p);
    }
    return lowest == Property::kPositiveSemidefinite ? highest : lowest;
  }

  std::optional<at::Tensor> diag(const EstimateOptions& estimate) const override {
    return total([&](const LinearOperator& A) { return A.diag(estimate); });
  }

  std::optional<at::Tensor> trace(const EstimateOptions& estimate) const override {
    return total([&](const LinearOperator& A) { return A.trace(estimate); });
  }

  // A + c I has the eigenvectors of A, which is symmetric if the sum is.
  std::optional<Spectrum> spectrum() const override {
    if (rest_.size() != 1) {
      return std::nullopt;
    }
    auto found = spectrum_of(with_property(rest_[0], Property::kSymmetric));
    return found ? std::make_optional(Spectrum{shifted(found->values), found->vectors})
                 : std::nullopt;
  }

  std::optional<Eigensolution> eigen() const override {
    if (rest_.size() != 1) {
      return std::nullopt;
    }
    auto found = eigen_of(rest_[0]);
    return found ? std::make_optional(Eigensolution{shifted(found->values), found->vectors})
                 : std::nullopt;
  }

 private:
  at::Tensor shifted(const at::Tensor& values) const {
    return tensor_shift_.defined() ? values + shift_ + tensor_shift_ : values + shift_;
  }

  template <typename Function>
  at::Tensor total(const Function& f) const {
    at::Tensor sum = f(parts_[0]);
    for (size_t i = 1; i < parts_.size(); ++i) {
      sum = sum + f(parts_[i]);
    }
    return sum;
  }

  std::vector<LinearOperator> rest_;  // the terms that are no multiples of the identity
  double shift_ = 0.0;
  at::Tensor tensor_shift_;  // [], with derivatives; undefined: none
};

class ScaledNode final : public NodeOf<ScaledNode> {
 public:
  ScaledNode(double c, const LinearOperator& A)
      : NodeOf("Scaled", A.node().batch, A.size(), A.options()), c_(c), A_(A) {}

  at::Tensor multiply(const at::Tensor& X) const override { return c_ * A_.node().multiply(X); }
  at::Tensor to_dense() const override { return c_ * A_.to_dense(); }
  LinearOperator transpose() const override {
    return make_operator<ScaledNode>(c_, A_.transpose());
  }
  bool is_symmetric() const override { return A_.is_symmetric(); }

  Property property() const override {
    const Property p = property_of(A_);
    return c_ > 0 ? p : std::min(p, Property::kSymmetric);
  }

  std::optional<at::Tensor> diag(const EstimateOptions& estimate) const override {
    return c_ * A_.diag(estimate);
  }

  std::optional<at::Tensor> trace(const EstimateOptions& estimate) const override {
    return c_ * A_.trace(estimate);
  }

  std::optional<Slogdet> slogdet(const EstimateOptions& estimate) const override {
    const Slogdet found = slogdet_of(A_, estimate);
    const double sign = c_ == 0 ? 0.0 : (c_ < 0 && n % 2 == 1 ? -1.0 : 1.0);
    return Slogdet{found.sign * sign,
                   found.logabsdet + static_cast<double>(n) * std::log(std::abs(c_))};
  }

  std::optional<LinearOperator> apply(const MatrixFunction& f) const override {
    if (!f.exponent || c_ == 0 || (c_ < 0 && !f.is_integer_power())) {
      return std::nullopt;
    }
    return std::pow(c_, *f.exponent) * detail::apply(A_, f);
  }

  std::optional<Spectrum> spectrum() const override {
    auto found = spectrum_of(with_property(A_, Property::kSymmetric));
    return found ? std::make_optional(Spectrum{c_ * found->values, found->vectors}) : std::nullopt;
  }

  std::optional<Eigensolution> eigen() const override {
    auto found = eigen_of(A_);
    return found ? std::make_optional(Eigensolution{c_ * found->values, found->vectors})
                 : std::nullopt;
  }

 private:
  double c_;
  LinearOperator A_;
};

at::Tensor diagonal_of(const LinearOperator& A) {
  const bool is_diagonal =
      node_as<DiagonalNode>(A) != nullptr || node_as<IdentityNode>(A) != nullptr;
  return is_diagonal ? A.diag() : at::Tensor();
}

}  // namespace
}  // namespace torchium::linalg::detail

namespace torchium::linalg {

using detail::node_as;

Sum::Sum(const std::vector<LinearOperator>& terms)
    : LinearOperator(detail::make_operator<detail::SumNode>(
          detail::checked_operators("Sum", "terms", terms, /*any_order=*/false))) {}

LinearOperator LinearOperator::plus(const LinearOperator& B) const {
  const LinearOperator& A = *this;
  detail::checked_operators("Sum", "terms", {A, B}, /*any_order=*/false);
  const auto* a = node_as<detail::IdentityNode>(A);
  const auto* b = node_as<detail::IdentityNode>(B);
  if (a != nullptr && b != nullptr) {
    return Identity(A.size(), a->scale + b->scale, A.options());
  }
  const at::Tensor d = detail::diagonal_of(A), e = detail::diagonal_of(B);
  if (d.defined() && e.defined()) {
    return Diagonal(d + e);
  }
  const auto* low_rank = node_as<detail::LowRankNode>(A);
  if (low_rank != nullptr && e.defined()) {
    return low_rank->plus_diagonal(e);
  }
  low_rank = node_as<detail::LowRankNode>(B);
  if (low_rank != nullptr && d.defined()) {
    return low_rank->plus_diagonal(d);
  }
  return Sum({A, B});
}

LinearOperator LinearOperator::scaled(double c) const {
  TORCH_CHECK_VALUE(std::isfinite(c), "Scaled: c is ", c, "; it must be finite.");
  if (const auto* identity = node_as<detail::IdentityNode>(*this)) {
    return Identity(size(), c * identity->scale, options());
  }
  if (const auto* diagonal = node_as<detail::DiagonalNode>(*this)) {
    return Diagonal(c * diagonal->d);
  }
  return detail::make_operator<detail::ScaledNode>(c, *this);
}

}  // namespace torchium::linalg
