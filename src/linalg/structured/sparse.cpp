// Sparse matrices, and matrices that are known by their products alone.
#include "linalg/common/operator_checks.h"
#include "linalg/structured/iterative/callable.h"
#include "linalg/structured/operand_checks.h"
#include "linalg/structured/operator_node.h"
#include "support/derivatives.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

namespace torchium::linalg::detail {
namespace {

// f(X) for X [n, m], on X [..., n, m].
template <typename Function>
at::Tensor on_columns(const at::Tensor& X, const Function& f) {
  if (X.dim() == 2) {
    return f(X);
  }
  const at::Tensor rows_first = X.movedim(-2, 0);
  return f(rows_first.flatten(1)).reshape(rows_first.sizes()).movedim(0, -2);
}

class SparseNode final : public NodeOf<SparseNode> {
 public:
  explicit SparseNode(const at::Tensor& A)
      : NodeOf("Sparse", std::vector<int64_t>{}, A.size(0), options_of(A)), A_(A) {}

  at::Tensor multiply(const at::Tensor& X) const override {
    return on_columns(X, [&](const at::Tensor& columns) {
      return columns.size(1) == 1 ? at::mv(A_, columns.squeeze(1)).unsqueeze(1)
                                  : at::matmul(A_, columns);
    });
  }

  LinearOperator transpose() const override {
    const at::Tensor coo = A_.layout() == at::kSparse ? A_ : A_.to_sparse();
    const at::Tensor transposed = coo.t().coalesce();
    return make_operator<SparseNode>(A_.layout() == at::kSparse ? transposed
                                                                : transposed.to_sparse_csr());
  }

  at::Tensor to_dense() const override { return A_.to_dense(); }

  std::optional<at::Tensor> diag(const EstimateOptions&) const override {
    const at::Tensor coo = (A_.layout() == at::kSparse ? A_ : A_.to_sparse()).coalesce();
    const at::Tensor indices = coo.indices();
    const at::Tensor on_diagonal = indices[0].eq(indices[1]).to(coo.scalar_type());
    return at::zeros({n}, options).index_add(0, indices[0], coo.values() * on_diagonal);
  }

 private:
  at::Tensor A_;
};

// A^T Y, the derivative of <Y, A X> with respect to X.
at::Tensor transposed_by_autograd(const LinearOperator::Product& product, const at::Tensor& Y) {
  const bool differentiable = c10::GradMode::is_enabled();
  const at::AutoGradMode enable_grad(true);
  const at::Tensor X = at::zeros(Y.sizes(), Y.options()).requires_grad_();
  const at::Tensor image = product(X);
  check_product(X, image);
  TORCH_CHECK_VALUE(image.requires_grad(),
                    "LinearOperator: the transposed product needs transpose_product, because "
                    "product is not differentiable with respect to X.");
  return torch::autograd::grad({image}, {X}, {Y}, /*retain_graph=*/differentiable,
                               /*create_graph=*/differentiable)[0];
}

class NoWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// CSR multiplies up to ten times as fast as COO.
at::Tensor with_compressed_rows(const at::Tensor& A) {
  const bool has_derivative =
      torchium::detail::requires_grad(A) || torchium::detail::has_any_tangent(A);
  if (A.layout() != at::kSparse || has_derivative || torchium::detail::levels_of(A).size() > 1) {
    return A;
  }
  NoWarnings no_warnings;  // that CSR tensors are in beta state: the caller has passed none
  const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
  return A.coalesce().to_sparse_csr();
}

}  // namespace

CallableNode::CallableNode(int64_t n, Product product, Product transpose_product,
                           const at::TensorOptions& options)
    : NodeOf("LinearOperator", std::vector<int64_t>{}, n, options),
      product_(std::move(product)),
      transpose_product_(std::move(transpose_product)) {}

at::Tensor CallableNode::multiply(const at::Tensor& X) const {
  return on_columns(X, [&](const at::Tensor& columns) {
    const int64_t version = torchium::detail::version_of(columns);
    at::Tensor Y = product_(columns);
    check_product(columns, Y);
    check_unchanged(columns, version);
    return Y;
  });
}

LinearOperator CallableNode::transpose() const {
  if (transpose_product_ != nullptr) {
    return make_operator<CallableNode>(n, transpose_product_, product_, options);
  }
  const auto transposed = [product = product_](const at::Tensor& Y) {
    return transposed_by_autograd(product, Y);
  };
  return make_operator<CallableNode>(n, transposed, product_, options);
}

LinearOperator make_dense_or_sparse(const char* kind, const at::Tensor& A) {
  if (A.defined() && A.layout() == at::kStrided) {
    return Dense(A);
  }
  TORCH_CHECK_VALUE(A.defined() && A.dim() == 2 && A.size(0) == A.size(1) && A.size(0) > 0, kind,
                    ": A is ", A.defined() ? at::str(A.sizes()) : "undefined",
                    "; it must be a square matrix, not empty.");
  TORCH_CHECK_VALUE(A.layout() == at::kSparse || A.layout() == at::kSparseCsr, kind,
                    ": A is of layout ", A.layout(), "; it must be dense, COO or CSR.");
  check_operator(kind, A.size(0), options_of(A));
  return make_operator<SparseNode>(with_compressed_rows(A));
}

}  // namespace torchium::linalg::detail

namespace torchium::linalg {
namespace {

const at::Tensor& checked_sparse(const at::Tensor& A) {
  TORCH_CHECK_VALUE(A.defined() && A.layout() != at::kStrided,
                    "Sparse: A is a dense tensor; pass A.to_sparse(), or use Dense.");
  return A;
}

}  // namespace

Sparse::Sparse(const at::Tensor& A)
    : LinearOperator(detail::make_dense_or_sparse("Sparse", checked_sparse(A))) {}

}  // namespace torchium::linalg
