// Counts the ways in which the graph of a backward pass reaches parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::gradients::detail {

// For each parameter, how many operators of the backward pass that runs on this thread take it as
// an operand; those that take a copy of it in another dtype (autocast) count, the copy does not.
// The last operator of the loss is not counted. All 0 outside of a backward pass.
std::vector<int64_t> backward_pass_edges(at::TensorList params);

}  // namespace torchium::gradients::detail
