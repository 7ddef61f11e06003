// The few random vectors of a sketch: see JacobianBlock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::gradients::detail {

// [k, size], always the same ones: independent normal numbers, so that the product with a matrix
// [size, m] has the norm of the matrix on average. One whose norm is ten times above a threshold
// has an image below it with a probability of 1e-7.
at::Tensor random_vectors(int64_t size, const at::TensorOptions& options);

}  // namespace torchium::gradients::detail
