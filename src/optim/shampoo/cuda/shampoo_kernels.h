// The steps of Shampoo by the kernels of a GPU, in a few launches for all parameters
// (cuda_kernels/optimizer_step/shampoo_step.h).
#pragma once

#include "optim/shampoo/shampoo_subset.h"

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace torchium::optim::detail {

// Whether the kernels know a parameter of these dimensions, merged as its blocks see them: of order
// two at most, with fewer than 2^31 - 1 elements.
bool has_kernel_shape(ParameterRule rule, at::IntArrayRef dims);

// Whether the kernels can take a parameter of the group: on a GPU, of such a shape, in a usual
// memory layout that its state shares, with float32 state. Never in a build without CUDA.
bool has_shampoo_kernels(const ShampooGroup& group, size_t param);

// For such a parameter: whether they can update what its block is cut from instead of the block.
bool can_update_in_place(const ShampooGroup& group, size_t param);

// For such parameters; see make_eager_subset(). `prologue` is that of the group.
std::unique_ptr<ShampooSubset> make_shampoo_kernels(const ShampooOptions& options,
                                                    const ShampooGroup& group,
                                                    const std::vector<size_t>& members,
                                                    std::span<const MatrixBatch> batches,
                                                    StepPrologue& prologue);

}  // namespace torchium::optim::detail
