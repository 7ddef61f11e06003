// Products of matrices.
#include "linalg/structured/operand_checks.h"
#include "linalg/structured/operator_node.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>

#include <vector>

namespace torchium::linalg::detail {
namespace {

class ProductNode final : public NodeOf<ProductNode> {
 public:
  explicit ProductNode(const std::vector<LinearOperator>& factors)
      : NodeOf("Product", common_batch(factors), factors[0].size(), factors[0].options()),
        factors_(factors) {}

  at::Tensor multiply(const at::Tensor& X) const override {
    at::Tensor Y = X;
    for (auto A = factors_.rbegin(); A != factors_.rend(); ++A) {
      Y = A->node().multiply(Y);
    }
    return Y;
  }

  at::Tensor to_dense() const override {
    at::Tensor product = factors_.back().to_dense();
    for (auto A = factors_.rbegin() + 1; A != factors_.rend(); ++A) {
      product = A->node().multiply(product);
    }
    return product;
  }

  LinearOperator transpose() const override {
    return reversed([](const LinearOperator& A) { return A.transpose(); });
  }

  std::optional<LinearOperator> apply(const MatrixFunction& f) const override {
    if (!f.is_inverse()) {
      return std::nullopt;
    }
    return reversed([&](const LinearOperator& A) { return detail::apply(A, f); });
  }

  std::optional<Slogdet> slogdet(const EstimateOptions& estimate) const override {
    Slogdet found{at::ones({}, options), at::zeros({}, options)};
    for (const LinearOperator& A : factors_) {
      const Slogdet factor = slogdet_of(A, estimate);
      found = {found.sign * factor.sign, found.logabsdet + factor.logabsdet};
    }
    return found;
  }

 private:
  template <typename Function>
  LinearOperator reversed(const Function& f) const {
    std::vector<LinearOperator> images;
    for (auto A = factors_.rbegin(); A != factors_.rend(); ++A) {
      images.push_back(f(*A));
    }
    return make_operator<ProductNode>(images);
  }

  std::vector<LinearOperator> factors_;
};

}  // namespace
}  // namespace torchium::linalg::detail

namespace torchium::linalg {

Product::Product(const std::vector<LinearOperator>& factors)
    : LinearOperator(detail::make_operator<detail::ProductNode>(
          detail::checked_operators("Product", "factors", factors, /*any_order=*/false))) {}

}  // namespace torchium::linalg
