// Batched products of matrices on a GPU by cuBLAS, float32 in the given precision. CUDA builds
// only, except matmul_precision. For split fp16 products see
// cuda_kernels/split_gemm/batched_product.h.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torchium::linalg::detail {

// As in torch.set_float32_matmul_precision.
enum class MatmulPrecision {
  kHighest,  // float32, or operands of 22 bits each
  kHigh,     // TF32, or operands of 11 bits each
};

// "highest" or "high"; none: torch's current setting.
MatmulPrecision matmul_precision(const std::optional<std::string>& name);

// C <- beta C + alpha X X^T, X: [N, n, k], or alpha X^T X, X: [N, k, n], for contiguous X and C [N,
// n, n]. alpha and beta are on the device.
TORCHIUM_API void gram_update_(at::Tensor& C, const at::Tensor& X, bool transposed,
                               const float* alpha, const float* beta, MatmulPrecision precision);

// out [N, m, n] <- A [N, m, k] B [N, k, n]; all are contiguous, and out aliases neither.
void multiply_batches_out(at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                          MatmulPrecision precision);

// out <- alpha A B + beta out
struct ProductScale {
  double alpha = 1, beta = 0;
};

// The same for matrices of which each has contiguous rows or columns; those of out are rows. Also
// in float64, where `precision` means nothing.
void multiply_strided_out(at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                          MatmulPrecision precision, ProductScale scale = {});

// Float32 matrices of one shape anywhere on a device, given by an array of addresses on the device.
struct MatrixAddresses {
  float* const* matrices;
  bool transposed = false;  // in the product
};

// C <- op(A) op(B) for `count` matrices; op(A) is [m, k], op(B) [k, n]. All are contiguous, and
// aligned to 16 bytes unless their row length is not a multiple of 4.
void multiply_at_addresses(float* const* C, const MatrixAddresses& A, const MatrixAddresses& B,
                           int64_t m, int64_t n, int64_t k, int64_t count,
                           MatmulPrecision precision);

}  // namespace torchium::linalg::detail
