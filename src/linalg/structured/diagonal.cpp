#include "linalg/structured/diagonal.h"

#include "linalg/common/operator_checks.h"
#include "linalg/structured/iterative/function_of_values.h"
#include "linalg/structured/operand_checks.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>

#include <cmath>

namespace torchium::linalg::detail {

DiagonalNode::DiagonalNode(const at::Tensor& d)
    : NodeOf("Diagonal", batch_of(d, 1), d.size(-1), options_of(d)), d(d) {}

at::Tensor DiagonalNode::multiply(const at::Tensor& X) const { return d.unsqueeze(-1) * X; }

std::optional<at::Tensor> DiagonalNode::multiply_left(const at::Tensor& X) const {
  return X * d.unsqueeze(-2);
}

LinearOperator DiagonalNode::transpose() const { return make_operator<DiagonalNode>(d); }

at::Tensor DiagonalNode::to_dense() const { return at::diag_embed(d); }

Property DiagonalNode::property() const {
  const double smallest = d.numel() == 0 ? 0.0 : d.detach().min().item<double>();
  return smallest > 0    ? Property::kPositiveDefinite
         : smallest == 0 ? Property::kPositiveSemidefinite
                         : Property::kSymmetric;
}

std::optional<Slogdet> DiagonalNode::slogdet(const EstimateOptions&) const {
  return Slogdet{d.sign().prod(-1), d.abs().log().sum(at::IntArrayRef{-1})};
}

std::optional<LinearOperator> DiagonalNode::apply(const MatrixFunction& f) const {
  return make_operator<DiagonalNode>(function_of_values(kind, f, d, /*noise=*/0.0));
}

std::optional<Spectrum> DiagonalNode::spectrum() const {
  return Spectrum{d, make_operator<IdentityNode>(n, 1.0, options)};
}

IdentityNode::IdentityNode(int64_t n, double scale, const at::TensorOptions& options)
    : NodeOf("Identity", std::vector<int64_t>{}, n, options), scale(scale) {}

// A copy, because the caller may change it in place.
at::Tensor IdentityNode::multiply(const at::Tensor& X) const {
  return scale == 1.0 ? X.clone() : scale * X;
}

std::optional<at::Tensor> IdentityNode::multiply_left(const at::Tensor& X) const {
  return multiply(X);
}

LinearOperator IdentityNode::transpose() const {
  return make_operator<IdentityNode>(n, scale, options);
}

at::Tensor IdentityNode::to_dense() const {
  return at::zeros({n, n}, options).fill_diagonal_(scale);
}

Property IdentityNode::property() const {
  return scale > 0    ? Property::kPositiveDefinite
         : scale == 0 ? Property::kPositiveSemidefinite
                      : Property::kSymmetric;
}

std::optional<at::Tensor> IdentityNode::diag(const EstimateOptions&) const {
  return at::full({n}, scale, options);
}

std::optional<Slogdet> IdentityNode::slogdet(const EstimateOptions&) const {
  const bool negative = scale < 0 && n % 2 == 1;
  const double sign = scale == 0 ? 0.0 : (negative ? -1.0 : 1.0);
  return Slogdet{
      at::full({}, sign, options),
      at::full({}, static_cast<double>(n) * std::log(std::abs(scale)), options),
  };
}

std::optional<LinearOperator> IdentityNode::apply(const MatrixFunction& f) const {
  const at::Tensor value = at::full({1}, scale, at::kDouble);
  const double image = function_of_values(kind, f, value, /*noise=*/0.0).item<double>();
  return make_operator<IdentityNode>(n, image, options);
}

std::optional<Spectrum> IdentityNode::spectrum() const {
  return Spectrum{at::full({n}, scale, options), make_operator<IdentityNode>(n, 1.0, options)};
}

}  // namespace torchium::linalg::detail

namespace torchium::linalg {

Diagonal::Diagonal(const at::Tensor& d)
    : LinearOperator(detail::make_operator<detail::DiagonalNode>(
          detail::checked_operand("Diagonal", "d", d, 1))) {}

Identity::Identity(int64_t n, double scale, const at::TensorOptions& options)
    : LinearOperator(detail::make_operator<detail::IdentityNode>(
          n, scale,
          at::TensorOptions(c10::typeMetaToScalarType(options.dtype())).device(options.device()))) {
  detail::check_operator("Identity", n, options);
  TORCH_CHECK_VALUE(std::isfinite(scale), "Identity: scale is ", scale, "; it must be finite.");
}

}  // namespace torchium::linalg
