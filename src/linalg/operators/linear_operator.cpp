// What operators can do, with the structure of their nodes or without.
#include "linalg/common/operator_checks.h"
#include "linalg/structured/dense.h"
#include "linalg/structured/iterative/callable.h"
#include "linalg/structured/iterative/function_of_values.h"
#include "linalg/structured/iterative/iterative_function.h"
#include "linalg/structured/operator_node.h"
#include "linalg/structured/power.h"
#include "support/derivatives.h"
#include "support/no_autocast.h"
#include "support/phase.h"
#include <torchium/linalg/estimators.h>
#include <torchium/linalg/krylov.h>
#include <torchium/linalg/linear_operator.h>
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace torchium::linalg {

using detail::MatrixFunction;
using detail::Property;

namespace detail {

OperatorNode::OperatorNode(const char* kind, std::vector<int64_t> batch, int64_t n,
                           const at::TensorOptions& options)
    : kind(kind), batch(std::move(batch)), n(n), options(options) {}

Property OperatorNode::property() const {
  return is_symmetric() ? Property::kSymmetric : Property::kNone;
}

at::Tensor OperatorNode::to_dense() const { return multiply(at::eye(n, options)); }

Property property_of(const LinearOperator& A) {
  return std::max(A.node().assumed, A.node().property());
}

LinearOperator with_property(const LinearOperator& A, Property property) {
  if (property <= A.node().assumed) {
    return A;
  }
  const auto copy = A.node().clone();
  copy->assumed = property;
  return LinearOperator(copy);
}

namespace {

bool is_small(const LinearOperator& A) { return A.size() <= kLargestDenseOrder; }

// A as a dense matrix with the same properties.
LinearOperator densified(const LinearOperator& A) {
  const Property symmetric = A.is_symmetric() ? Property::kSymmetric : Property::kNone;
  return with_property(Dense(A.to_dense()), std::max(A.node().assumed, symmetric));
}

// Of f(A), from what is known of A without reading values.
Property property_of_image(const LinearOperator& A, const MatrixFunction& f) {
  const Property symmetric = A.is_symmetric() ? Property::kSymmetric : Property::kNone;
  const Property known = std::max(A.node().assumed, symmetric);
  if (known < Property::kSymmetric || known == Property::kPositiveDefinite) {
    return known;
  }
  if (!f.exponent) {
    return Property::kPositiveDefinite;
  }
  if (*f.exponent < 0 && known == Property::kPositiveSemidefinite) {
    return Property::kPositiveDefinite;  // it exists
  }
  return f.is_integer_power() ? known : Property::kPositiveSemidefinite;
}

LinearOperator unnamed_image(const LinearOperator& A, const MatrixFunction& f) {
  if (f.exponent == 1.0) {
    return A;
  }
  if (auto found = A.node().apply(f)) {
    return *found;
  }
  if (f.exponent == 0.0 && A.node().batch.empty()) {
    return Identity(A.size(), 1.0, A.options());
  }
  if (f.is_positive_integer_power() && f.is_power_of_few_factors()) {
    return make_operator<PowerNode>(A, static_cast<int64_t>(*f.exponent));
  }
  if (A.is_symmetric()) {
    const auto found = A.node().spectrum();
    // Eigenvectors have no derivative where eigenvalues are equal; functions of matrices have one.
    const bool has_derivative = found && torchium::detail::is_differentiated(found->values);
    if (found && !(has_derivative && is_small(A))) {
      const at::Tensor image =
          function_of_values(A.node().kind, f, found->values, eigenvalue_rounding(found->values));
      return Product({found->vectors, Diagonal(image), found->vectors.transpose()});
    }
  }
  if (f.is_power_of_few_factors()) {
    MatrixFunction inverse = f;
    inverse.exponent = -1.0;
    return make_operator<PowerNode>(apply(A, inverse), static_cast<int64_t>(-*f.exponent));
  }
  if (is_small(A)) {
    const at::Tensor dense = A.to_dense();
    return f.is_inverse() ? make_operator<FactorizedInverse>(f, A, dense)
                          : Dense(function_of_dense(A.node().kind, f, dense, A.is_symmetric()));
  }
  return f.is_inverse() ? make_iterative_inverse(A, f.iteration) : make_krylov_function(A, f);
}

}  // namespace

LinearOperator apply(const LinearOperator& A, const MatrixFunction& f) {
  return with_property(unnamed_image(A, f), property_of_image(A, f));
}

std::optional<LinearOperator> apply_to_inverse(const LinearOperator& A, const MatrixFunction& f) {
  if (!f.exponent) {
    return std::nullopt;
  }
  MatrixFunction g = f;
  g.exponent = -*f.exponent;
  return apply(A, g);
}

std::optional<Spectrum> spectrum_of(const LinearOperator& A) {
  if (!A.is_symmetric()) {
    return std::nullopt;
  }
  if (auto found = A.node().spectrum()) {
    return found;
  }
  return is_small(A) ? densified(A).node().spectrum() : std::nullopt;
}

std::optional<Eigensolution> eigen_of(const LinearOperator& A) {
  if (A.is_symmetric()) {
    if (auto found = A.node().spectrum()) {
      const auto vectors = [V = found->vectors](const at::Tensor& indices) {
        at::Tensor columns = at::zeros({V.size(), indices.size(0)}, V.options());
        columns.scatter_(0, indices.unsqueeze(0), 1.0);
        return V.matmul(columns);
      };
      return Eigensolution{found->values, vectors};
    }
  }
  // The parts of a symmetric matrix may have complex eigenvectors.
  auto found = A.node().eigen();
  if (found && !(A.is_symmetric() && found->values.is_complex())) {
    return found;
  }
  return is_small(A) ? densified(A).node().eigen() : std::nullopt;
}

Slogdet slogdet_of(const LinearOperator& A, const EstimateOptions& options) {
  if (auto found = A.node().slogdet(options)) {
    return *found;
  }
  if (const auto found = A.is_symmetric() ? A.node().spectrum() : std::nullopt) {
    return *Diagonal(found->values).node().slogdet(options);
  }
  if (!options.num_samples) {
    return *densified(A).node().slogdet(options);
  }
  TORCH_CHECK_VALUE(property_of(A) == Property::kPositiveDefinite, A.node().kind,
                    ".slogdet: num_samples is ", *options.num_samples,
                    ", but the operator is not known to be positive definite. If it is, use "
                    "assume(\"positive_definite\"); else leave num_samples out.");
  LogdetOptions quadrature;
  quadrature.num_samples = *options.num_samples;
  quadrature.seed = options.seed;
  const at::Tensor value = logdet(A, quadrature).value.to(A.options().dtype());
  return {at::ones_like(value), value};
}

namespace {

// Columns of a product with the identity.
constexpr int64_t kIdentityColumns = 256;

at::Tensor diagonal_by_products(const LinearOperator& A) {
  std::vector<at::Tensor> parts;
  for (int64_t first = 0; first < A.size(); first += kIdentityColumns) {
    const int64_t columns = std::min(kIdentityColumns, A.size() - first);
    at::Tensor E = at::zeros({A.size(), columns}, A.options());
    E.narrow(0, first, columns).fill_diagonal_(1.0);
    parts.push_back(A.matmul(E).narrow(-2, first, columns).diagonal(0, -2, -1));
  }
  return at::cat(parts, -1);
}

void check_single(const char* function, const LinearOperator& A) {
  TORCH_CHECK_VALUE(A.node().batch.empty(), A.node().kind, ".", function,
                    ": the operator is a batch of matrices, ", at::IntArrayRef(A.sizes()),
                    "; take them one by one.");
}

// Orders of eigenvalues, the most wanted first.
at::Tensor ranking(const at::Tensor& values, const std::string& which, bool symmetric) {
  const auto real = [&] { return values.is_complex() ? at::real(values) : values; };
  const auto imaginary = [&] {
    return values.is_complex() ? at::imag(values).abs() : at::zeros_like(values);
  };
  if (which == "LM") {
    return values.abs();
  }
  if (which == (symmetric ? "LA" : "LR")) {
    return real();
  }
  if (which == (symmetric ? "SA" : "SR")) {
    return -real();
  }
  TORCH_CHECK_VALUE(!symmetric && which == "LI", "eigs: which is \"", which, "\"; it must be ",
                    symmetric ? "\"LM\", \"LA\" or \"SA\" for a symmetric operator."
                              : "\"LM\", \"LR\", \"SR\" or \"LI\" for an operator that is not "
                                "known to be symmetric.");
  return imaginary();
}

}  // namespace
}  // namespace detail

LinearOperator::LinearOperator(std::shared_ptr<const detail::OperatorNode> node)
    : node_(std::move(node)) {}

LinearOperator::LinearOperator(const at::Tensor& A)
    : LinearOperator(detail::make_dense_or_sparse("LinearOperator", A)) {}

LinearOperator::LinearOperator(int64_t n, Product product, const at::TensorOptions& options,
                               Product transpose_product)
    : LinearOperator(detail::make_operator<detail::CallableNode>(
          n, std::move(product), std::move(transpose_product),
          at::TensorOptions(c10::typeMetaToScalarType(options.dtype())).device(options.device()))) {
  detail::check_operator("LinearOperator", n, options);
  TORCH_CHECK_VALUE(static_cast<const detail::CallableNode&>(*node_).has_product(),
                    "LinearOperator: product is empty.");
}

int64_t LinearOperator::size() const { return node_->n; }

std::vector<int64_t> LinearOperator::sizes() const {
  std::vector<int64_t> sizes = node_->batch;
  sizes.insert(sizes.end(), {node_->n, node_->n});
  return sizes;
}

const at::TensorOptions& LinearOperator::options() const { return node_->options; }

std::string LinearOperator::kind() const { return node_->kind; }

namespace {

// dim: of a matrix X, which must be of the order of A; a vector has only one.
void check_operand(const detail::OperatorNode& A, const at::Tensor& X, int64_t dim,
                   const char* entries) {
  TORCH_CHECK_VALUE(X.defined() && X.dim() >= 1 && X.size(X.dim() == 1 ? 0 : dim) == A.n, A.kind,
                    ": X is ", X.defined() ? at::str(X.sizes()) : "undefined", "; it must have ",
                    A.n, " ", entries, ".");
  TORCH_CHECK_VALUE(X.dtype() == A.options.dtype() && X.device() == A.options.device(), A.kind,
                    ": X is ", X.scalar_type(), " on ", X.device(), ", the operator ",
                    c10::typeMetaToScalarType(A.options.dtype()), " on ", A.options.device(),
                    "; they must be equal.");
}

}  // namespace

at::Tensor LinearOperator::matmul(const at::Tensor& X) const {
  const torchium::detail::NoAutocast no_autocast;
  check_operand(*node_, X, -2, "rows");
  return X.dim() == 1 ? node_->multiply(X.unsqueeze(-1)).squeeze(-1) : node_->multiply(X);
}

at::Tensor LinearOperator::rmatmul(const at::Tensor& X) const {
  const torchium::detail::NoAutocast no_autocast;
  check_operand(*node_, X, -1, "columns");
  const at::Tensor rows = X.dim() == 1 ? X.unsqueeze(0) : X;
  const auto found = node_->multiply_left(rows);
  // X A = (A^T X^T)^T.
  const at::Tensor product = found ? *found : transpose().node_->multiply(rows.mT()).mT();
  return X.dim() == 1 ? product.squeeze(-2) : product;
}

bool LinearOperator::is_dense() const {
  return node_->batch.empty() && detail::node_as<detail::DenseNode>(*this) != nullptr;
}

at::Tensor LinearOperator::to_dense() const {
  const torchium::detail::NoAutocast no_autocast;
  return node_->to_dense();
}

bool LinearOperator::is_symmetric() const {
  return node_->assumed >= Property::kSymmetric || node_->is_symmetric();
}

LinearOperator LinearOperator::transpose() const {
  return is_symmetric() ? *this : node_->transpose();
}

LinearOperator LinearOperator::assume(const std::string& property) const {
  if (property == "symmetric") {
    return detail::with_property(*this, Property::kSymmetric);
  }
  if (property == "positive_semidefinite") {
    return detail::with_property(*this, Property::kPositiveSemidefinite);
  }
  TORCH_CHECK_VALUE(property == "positive_definite", "assume: property is \"", property,
                    "\"; it must be \"symmetric\", \"positive_semidefinite\" or "
                    "\"positive_definite\".");
  return detail::with_property(*this, Property::kPositiveDefinite);
}

namespace {

LinearOperator image(const LinearOperator& A, const char* name, std::optional<double> exponent,
                     const IterationOptions& options) {
  const torchium::detail::NoAutocast no_autocast;
  detail::check_iteration(name, options);
  return detail::apply(A, MatrixFunction{name, exponent, options});
}

void check_estimate(const char* function, const EstimateOptions& options) {
  if (options.num_samples) {
    detail::check_positive(function, "num_samples", *options.num_samples);
  }
}

}  // namespace

LinearOperator LinearOperator::inverse(const IterationOptions& options) const {
  const torchium::detail::Phase phase("torchium::inverse");
  return image(*this, "inverse", -1.0, options);
}

at::Tensor LinearOperator::solve(const at::Tensor& X, const IterationOptions& options) const {
  const torchium::detail::Phase phase("torchium::solve");
  return image(*this, "solve", -1.0, options).matmul(X);
}

LinearOperator LinearOperator::exp(const IterationOptions& options) const {
  const torchium::detail::Phase phase("torchium::exp");
  return image(*this, "exp", std::nullopt, options);
}

LinearOperator LinearOperator::sqrt(const IterationOptions& options) const {
  const torchium::detail::Phase phase("torchium::sqrt");
  return image(*this, "sqrt", 0.5, options);
}

LinearOperator LinearOperator::pow(double exponent, const IterationOptions& options) const {
  const torchium::detail::Phase phase("torchium::pow");
  TORCH_CHECK_VALUE(std::isfinite(exponent), "pow: exponent is ", exponent, "; it must be finite.");
  return image(*this, "pow", exponent, options);
}

at::Tensor LinearOperator::diag(const EstimateOptions& options) const {
  const torchium::detail::Phase phase("torchium::diag");
  const torchium::detail::NoAutocast no_autocast;
  check_estimate("diag", options);
  if (auto found = node_->diag(options)) {
    return *found;
  }
  if (!options.num_samples) {
    return detail::diagonal_by_products(*this);
  }
  detail::check_single("diag", *this);
  HutchinsonOptions hutchinson;
  hutchinson.num_samples = *options.num_samples;
  hutchinson.seed = options.seed;
  return hutchinson_diagonal(*this, hutchinson).value;
}

at::Tensor LinearOperator::trace(const EstimateOptions& options) const {
  const torchium::detail::Phase phase("torchium::trace");
  const torchium::detail::NoAutocast no_autocast;
  check_estimate("trace", options);
  if (auto found = node_->trace(options)) {
    return *found;
  }
  const auto diagonal = node_->diag(options);
  if (diagonal || !options.num_samples) {
    return (diagonal ? *diagonal : detail::diagonal_by_products(*this)).sum(at::IntArrayRef{-1});
  }
  detail::check_single("trace", *this);
  constexpr int64_t kLeastProducts = 3;
  const int64_t products = std::max(kLeastProducts, *options.num_samples);
  return hutchpp(*this, products, options.seed).value.to(this->options().dtype());
}

std::tuple<at::Tensor, at::Tensor> LinearOperator::slogdet(const EstimateOptions& options) const {
  const torchium::detail::Phase phase("torchium::slogdet");
  const torchium::detail::NoAutocast no_autocast;
  check_estimate("slogdet", options);
  const detail::Slogdet found = detail::slogdet_of(*this, options);
  const at::IntArrayRef batch = node_->batch;
  return {found.sign.expand(batch), found.logabsdet.expand(batch)};
}

at::Tensor LinearOperator::logdet(const EstimateOptions& options) const {
  const auto [sign, logabsdet] = slogdet(options);
  return at::where(sign.detach() < 0, at::full_like(logabsdet, NAN), logabsdet);
}

at::Tensor LinearOperator::det(const EstimateOptions& options) const {
  const auto [sign, logabsdet] = slogdet(options);
  return sign * logabsdet.exp();
}

std::tuple<at::Tensor, at::Tensor> LinearOperator::eigs(std::optional<int64_t> k,
                                                        const std::string& which) const {
  const torchium::detail::Phase phase("torchium::eigs");
  const torchium::detail::NoAutocast no_autocast;
  detail::check_single("eigs", *this);
  TORCH_CHECK_VALUE(!k || (*k >= 1 && *k <= size()), "eigs: k is ", k.value_or(0),
                    "; it must be from 1 to n = ", size(), ".");
  const bool symmetric = is_symmetric();
  detail::ranking(at::empty({0}), which, symmetric);
  if (const auto found = detail::eigen_of(*this)) {
    const at::Tensor order = detail::ranking(found->values.detach(), which, symmetric)
                                 .argsort(/*stable=*/true, /*dim=*/0, /*descending=*/true)
                                 .narrow(0, 0, k.value_or(size()));
    const at::Tensor values = found->values.index_select(0, order);
    if (symmetric || values.is_complex()) {
      return {values, found->vectors(order)};
    }
    const auto complex = c10::toComplexType(values.scalar_type());
    return {values.to(complex), found->vectors(order).to(complex)};
  }
  TORCH_CHECK_VALUE(k, node_->kind, ".eigs: k is missing; all eigenpairs of an operator of order ",
                    size(), " without structure take a dense matrix, Dense(A.to_dense()).");
  KrylovOptions krylov;
  krylov.which = which;
  const KrylovEigenpairs pairs =
      symmetric ? lanczos(*this, *k, krylov) : arnoldi(*this, *k, krylov);
  return {pairs.eigenvalues, pairs.eigenvectors};
}

}  // namespace torchium::linalg
