// Norms, and checks of operators, of their products and of options. Every error is a
// c10::ValueError.
#pragma once

#include "support/tensor_version.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace torchium::linalg::detail {

// Order of at least 1; float32 or float64.
inline void check_operator(const char* function, int64_t n, const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(n > 0, function, ": n is ", n, "; it must be positive.");
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kDouble, function, ": dtype is ",
                    c10::getDtypeNames(dtype).first, "; it must be float32 or float64.");
}

inline void check_product(const at::Tensor& X, const at::Tensor& product) {
  TORCH_CHECK_VALUE(product.defined() && product.sizes() == X.sizes() &&
                        product.scalar_type() == X.scalar_type() && product.device() == X.device(),
                    "The operator's product with ", X.sizes(), " columns of ", X.scalar_type(),
                    " on ", X.device(), " is ",
                    product.defined() ? c10::str(product.sizes(), " of ", product.scalar_type(),
                                                 " on ", product.device())
                                      : "undefined",
                    "; it must be of the same shape, dtype and device.");
}

// Since its version was that, before the product.
inline void check_unchanged(const at::Tensor& X, int64_t version) {
  TORCH_CHECK_VALUE(torchium::detail::version_of(X) == version,
                    "The operator's product has changed X in place; it must leave X as it is.");
}

// The norms of x along `dim`, float64: the squares of float32 numbers leave their range.
inline at::Tensor norms(const at::Tensor& x, int64_t dim, bool keepdim = false) {
  return at::linalg_vector_norm(x, 2, dim, keepdim, at::kDouble);
}

inline void check_positive(const char* function, const char* name, int64_t value) {
  TORCH_CHECK_VALUE(value > 0, function, ": ", name, " is ", value, "; it must be positive.");
}

}  // namespace torchium::linalg::detail
