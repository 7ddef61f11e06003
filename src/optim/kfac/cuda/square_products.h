// Products of square matrices on Hopper's tensor cores: every operand as two fp16 numbers
// (split_fp16.h), for nearly float32 precision, or as one where torch's precision of float32
// products is "high".
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::optim::detail {

// Whether the functions below multiply M: float32 [N, n, n] on such a device, with n of some size.
bool has_square_products(const at::Tensor& M);

// A B, both [N, n, n]. All results are contiguous.
at::Tensor square_product(const at::Tensor& A, const at::Tensor& B);
// M^T M, or M M^T; exactly symmetric.
at::Tensor square_gram(const at::Tensor& M, bool of_rows);
// M^T S M
at::Tensor square_congruence(const at::Tensor& M, const at::Tensor& S);

}  // namespace torchium::optim::detail
