// A square matrix that is known by its products.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <functional>

namespace torchium::linalg {

class TORCHIUM_API LinearOperator {
 public:
  // [n, columns] -> [n, columns], of the operator's dtype and device.
  using Product = std::function<at::Tensor(const at::Tensor& X)>;

  // A [n, n], dense or sparse, float32 or float64.
  LinearOperator(const at::Tensor& A);  // NOLINT(google-explicit-constructor)

  // `product` gives A X. dtype: float32 (default) or float64.
  LinearOperator(int64_t n, Product product, const at::TensorOptions& options = {});

  int64_t size() const { return n_; }
  const at::TensorOptions& options() const { return options_; }
  bool is_dense() const { return is_dense_; }  // made from a dense matrix

  // A X. c10::ValueError: X, or what `product` returned, is not [n, columns] of the operator's
  // dtype and device.
  at::Tensor matmul(const at::Tensor& X) const;

 private:
  int64_t n_;
  Product product_;
  bool is_dense_ = false;
  at::TensorOptions options_;
};

}  // namespace torchium::linalg
