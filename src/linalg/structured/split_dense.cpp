#include "linalg/structured/split_dense.h"

#include "linalg/products/product_workspace.h"
#include "linalg/products/split_product.h"
#include "linalg/structured/dense.h"

#include <ATen/ops/empty.h>

#include <optional>

namespace torchium::linalg::detail {
namespace {

// Below these sizes float32 arithmetic is as fast.
constexpr int64_t kLeastOrder = 4096;
constexpr int64_t kLeastColumns = 64;
constexpr int64_t kLeastTotal = 256;

class SplitDenseNode final : public NodeOf<SplitDenseNode> {
 public:
  explicit SplitDenseNode(const at::Tensor& A)
      : NodeOf("Dense", {}, A.size(0), options_of(A)), A_(A) {
    parts_ = split_rows(A, parts_.values);
  }

  at::Tensor multiply(const at::Tensor& X) const override {
    at::Tensor out = at::empty(X.sizes(), X.options());
    at::Tensor columns, product;
    multiply_split_out(out, parts_, split_columns(X, columns), product);
    return out;
  }

  LinearOperator transpose() const override { return make_operator<DenseNode>(A_.mT()); }

 private:
  at::Tensor A_;
  TileOperand parts_;
};

bool fits(const at::Tensor& A) {
  const auto bytes = static_cast<double>(A.nbytes());
  return static_cast<double>(workspace_budget(A.device(), std::nullopt, bytes)) >= bytes;
}

}  // namespace

LinearOperator prepared_for(const LinearOperator& A, const ExpectedProducts& expected) {
  if (!A.is_dense() || A.size() < kLeastOrder || expected.columns < kLeastColumns ||
      expected.total < kLeastTotal || A.options().dtype() != at::kFloat ||
      !has_split_product(A.options().device())) {
    return A;
  }
  const at::Tensor matrix = A.to_dense().detach();
  return matrix.is_neg() || !fits(matrix) ? A : make_operator<SplitDenseNode>(matrix);
}

}  // namespace torchium::linalg::detail
