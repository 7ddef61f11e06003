// Blocks of parameters on a GPU and their directions, applied together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

struct BlockMove {
  at::Tensor target;     // a view of the parameter
  at::Tensor direction;  // contiguous
};

// Whether kernels take it: on a GPU, of order one or two with neighbouring columns, in float32 or
// 16 bits. Never in a build without CUDA.
bool has_move_kernel(const BlockMove& move);

// p <- (1 - lr wd) p - lr d for all of these. `lr`: see PlannedStep.
void move_by_kernels(const std::vector<BlockMove>& moves, const at::Tensor& lr,
                     double decoupled_weight_decay);

}  // namespace torchium::optim::detail
