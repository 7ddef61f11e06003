// Kronecker products of matrices.
#include "linalg/structured/operand_checks.h"
#include "linalg/structured/operator_node.h"
#include "linalg/structured/power.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

namespace torchium::linalg::detail {
namespace {

int64_t product_of_orders(const std::vector<LinearOperator>& factors) {
  int64_t n = 1;
  for (const LinearOperator& A : factors) {
    TORCH_CHECK_VALUE(!__builtin_mul_overflow(n, A.size(), &n),
                      "Kronecker: the order of the product exceeds 2^63.");
  }
  return n;
}

// a (x) b of vectors along the last dimension.
at::Tensor kron_vectors(const at::Tensor& a, const at::Tensor& b) {
  return (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2);
}

at::Tensor kron_matrices(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor blocks = a.unsqueeze(-1).unsqueeze(-3) * b.unsqueeze(-2).unsqueeze(-4);
  return blocks.flatten(-2).flatten(-3, -2);
}

// [..., rows, columns] -> [..., *sizes]
at::Tensor with_last_sizes(const at::Tensor& X, std::initializer_list<int64_t> sizes) {
  std::vector<int64_t> all = batch_of(X, 2);
  all.insert(all.end(), sizes);
  return X.reshape(all);
}

// Estimates that are multiplied need signs of their own: products of the same would be biased.
EstimateOptions of_factor(EstimateOptions estimate, size_t factor) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  estimate.seed += kOdd * factor;
  return estimate;
}

class KroneckerNode final : public NodeOfParts<KroneckerNode> {
 public:
  explicit KroneckerNode(const std::vector<LinearOperator>& factors)
      : NodeOfParts("Kronecker", product_of_orders(factors), factors, common_batch(factors)) {}

  // One factor after the other, each as one product with all columns: [..., left, order, right].
  at::Tensor multiply(const at::Tensor& X) const override {
    at::Tensor Y = X;
    int64_t left = 1, right = n;
    for (const LinearOperator& A : parts_) {
      const int64_t order = A.size(), columns = right / order * X.size(-1);
      const at::Tensor operand =
          with_last_sizes(Y, {left, order, columns}).transpose(-3, -2).flatten(-2);
      const at::Tensor image = A.node().multiply(operand);  // with the factor's batch
      Y = with_last_sizes(image, {order, left, columns}).transpose(-3, -2).flatten(-3, -2);
      Y = with_last_sizes(Y, {n, X.size(-1)});
      left *= order;
      right /= order;
    }
    return Y;
  }

  at::Tensor to_dense() const override {
    return fold([&](size_t i) { return parts_[i].to_dense(); }, kron_matrices);
  }

  std::optional<at::Tensor> diag(const EstimateOptions& estimate) const override {
    return fold([&](size_t i) { return parts_[i].diag(of_factor(estimate, i)); }, kron_vectors);
  }

  std::optional<at::Tensor> trace(const EstimateOptions& estimate) const override {
    return fold([&](size_t i) { return parts_[i].trace(of_factor(estimate, i)); },
                [](const at::Tensor& a, const at::Tensor& b) { return a * b; });
  }

  // det (A (x) B) = det(A)^nB det(B)^nA.
  std::optional<Slogdet> slogdet(const EstimateOptions& estimate) const override {
    Slogdet found{at::ones({}, options), at::zeros({}, options)};
    for (const LinearOperator& A : parts_) {
      const Slogdet factor = slogdet_of(A, estimate);
      const int64_t others = n / A.size();
      found.sign = found.sign * (others % 2 == 0 ? factor.sign.abs() : factor.sign);
      found.logabsdet = found.logabsdet + static_cast<double>(others) * factor.logabsdet;
    }
    return found;
  }

  // Powers of the product are products of powers; roots only if no eigenvalue turns too far.
  std::optional<LinearOperator> apply(const MatrixFunction& f) const override {
    if (!f.exponent || (!f.is_integer_power() && property() < Property::kPositiveSemidefinite &&
                        !has_product_of_roots())) {
      return std::nullopt;
    }
    // A factor multiplies n / order columns for each of X, so that its power itself pays.
    return mapped([&](const LinearOperator& A) {
      const LinearOperator image = detail::apply(A, f);
      const bool pays = f.is_power_of_few_factors() && A.size() <= n / A.size() &&
                        A.size() <= kLargestDenseOrder && node_as<PowerNode>(image) != nullptr;
      return pays ? with_property(Dense(image.to_dense()), property_of(image)) : image;
    });
  }

  std::optional<Spectrum> spectrum() const override {
    std::vector<LinearOperator> vectors;
    at::Tensor values;
    for (const LinearOperator& A : parts_) {
      auto found = spectrum_of(A);
      if (!found) {
        return std::nullopt;
      }
      values = values.defined() ? kron_vectors(values, found->values) : found->values;
      vectors.push_back(found->vectors);
    }
    return Spectrum{values, make_operator<KroneckerNode>(vectors)};
  }

  std::optional<Eigensolution> eigen() const override {
    std::vector<Eigensolution> parts;
    at::Tensor values;
    for (const LinearOperator& A : parts_) {
      auto found = eigen_of(A);
      if (!found) {
        return std::nullopt;
      }
      values = values.defined() ? kron_vectors(values, found->values) : found->values;
      parts.push_back(*found);
    }
    // Columns of the product are Kronecker products of columns.
    const auto vectors = [parts, n = n](const at::Tensor& indices) {
      at::Tensor columns;  // [k, order so far]
      int64_t stride = n;
      for (const Eigensolution& part : parts) {
        const int64_t order = part.values.size(0);
        stride /= order;
        const at::Tensor mine = part.vectors(indices.div(stride, "floor").remainder(order)).mT();
        columns = columns.defined() ? kron_vectors(columns, mine) : mine;
      }
      return columns.mT();
    };
    return Eigensolution{values, vectors};
  }

 private:
  // (a b)^p = a^p b^p for complex a and b whose angles add up to less than pi. A symmetric product
  // has a spectrum, which is as cheap.
  bool has_product_of_roots() const {
    const auto is_small = [](const LinearOperator& A) { return A.size() <= kLargestDenseOrder; };
    if (!batch.empty() || is_symmetric() || !std::ranges::all_of(parts_, is_small)) {
      return false;
    }
    const c10::NoGradGuard no_grad;
    double angle = 0.0;
    for (const LinearOperator& A : parts_) {
      if (property_of(A) < Property::kPositiveSemidefinite) {
        angle += eigen_of(A)->values.angle().abs().max().item<double>();
      }
    }
    constexpr double kLargestAngle = 0.99 * M_PI;
    return angle <= kLargestAngle;
  }

  template <typename Function, typename Combine>
  at::Tensor fold(const Function& f, const Combine& combine) const {
    at::Tensor result = f(0);
    for (size_t i = 1; i < parts_.size(); ++i) {
      result = combine(result, f(i));
    }
    return result;
  }
};

}  // namespace
}  // namespace torchium::linalg::detail

namespace torchium::linalg {

Kronecker::Kronecker(const std::vector<LinearOperator>& factors)
    : LinearOperator(detail::make_operator<detail::KroneckerNode>(
          detail::checked_operators("Kronecker", "factors", factors, /*any_order=*/true))) {}

}  // namespace torchium::linalg
