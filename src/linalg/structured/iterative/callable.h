// Matrices that are known by their products alone.
#pragma once

#include "linalg/structured/operator_node.h"

namespace torchium::linalg::detail {

class CallableNode final : public NodeOf<CallableNode> {
 public:
  using Product = LinearOperator::Product;
  CallableNode(int64_t n, Product product, Product transpose_product,
               const at::TensorOptions& options);
  at::Tensor multiply(const at::Tensor& X) const override;
  LinearOperator transpose() const override;
  bool has_product() const { return product_ != nullptr; }

 private:
  Product product_, transpose_product_;  // the latter may be empty
};

// Dense for strided tensors, Sparse for COO and CSR.
LinearOperator make_dense_or_sparse(const char* kind, const at::Tensor& A);

}  // namespace torchium::linalg::detail
