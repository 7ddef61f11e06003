// Grafting: directions take the length of those of the grafted method, block by block.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::optim::detail {

// |f| / |d| d for each block of [count, sizes...]; zero where d is zero.
at::Tensor graft(const at::Tensor& directions, const at::Tensor& grafted);

// The same for a parameter with the diagonal rule, cut into blocks of block_size. May overwrite
// `direction`.
at::Tensor graft_diagonal(const at::Tensor& direction, const at::Tensor& grafted,
                          int64_t block_size);

}  // namespace torchium::optim::detail
