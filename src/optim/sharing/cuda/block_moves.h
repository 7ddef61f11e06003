// Blocks of tensors on a GPU, gathered or moved together.
#pragma once

#include "optim/sharing/shared_blocks.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

struct TensorBlock {
  at::Tensor tensor;  // contiguous
  ElementRows rows;   // of it
  at::Tensor values;  // contiguous, of their size
};

// Whether kernels take it: on a GPU, the tensor in float32 or 16 bits, the values in float32. Never
// in a build without CUDA.
bool has_block_kernel(const at::Tensor& tensor, const at::Tensor& values);

// p <- (1 - lr wd) p - lr d for the elements p of the tensors and d of the values. `lr`: see
// PlannedStep.
void move_by_kernels(const std::vector<TensorBlock>& blocks, const at::Tensor& lr,
                     double decoupled_weight_decay);
// Copies the elements of the tensors to the values.
void gather_by_kernels(const std::vector<TensorBlock>& blocks);

}  // namespace torchium::optim::detail
