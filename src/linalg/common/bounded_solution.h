// The last steps of a batched solver.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// [N, ...] -> [batch, ...].
at::Tensor restore_batch(const at::Tensor& x, at::IntArrayRef batch);

// Saturated at the largest number of `dtype` and rounded to it; NaN stays. May change x.
at::Tensor saturated(at::Tensor x, at::ScalarType dtype);

// result * factor in the same memory, saturated at the largest number of `dtype` and rounded to it;
// NaN where `finite` is false. result: [..., n, m]; factor and finite: [...], broadcast. Returns a
// contiguous tensor.
at::Tensor bounded_solution(at::Tensor result, const at::Tensor& factor, const at::Tensor& finite,
                            at::ScalarType dtype);

}  // namespace torchium::linalg::detail
