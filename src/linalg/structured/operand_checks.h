// Checks and shapes of the tensors and operators that operators are made of. Every error is a
// c10::ValueError.
#pragma once

#include "linalg/structured/operator_node.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::linalg::detail {

// float32 or float64, dense, of at least `dim` dimensions, the last one not empty.
const at::Tensor& checked_operand(const char* kind, const char* name, const at::Tensor& operand,
                                  int64_t dim);
// checked_operand, and square in the last two dimensions.
const at::Tensor& checked_matrix(const char* kind, const at::Tensor& A);

// The dimensions before the last `dim`.
std::vector<int64_t> batch_of(const at::Tensor& operand, int64_t dim);
at::TensorOptions options_of(const at::Tensor& operand);

// Not empty; one dtype and device, and one order unless `any_order`; batches that broadcast.
const std::vector<LinearOperator>& checked_operators(const char* kind, const char* name,
                                                     const std::vector<LinearOperator>& operators,
                                                     bool any_order);
std::vector<int64_t> common_batch(const std::vector<LinearOperator>& operators);

}  // namespace torchium::linalg::detail
