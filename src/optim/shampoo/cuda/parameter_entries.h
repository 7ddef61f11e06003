// Parameters as the kernels of a step of Shampoo see them
// (cuda_kernels/optimizer_step/shampoo_step.h). CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/shampoo_step.h"
#include "optim/shampoo/shampoo_subset.h"

#include <ATen/core/Tensor.h>

#include <array>

namespace torchium::optim::detail {

// State of the shape of the parameter; undefined where it has none.
std::array<const at::Tensor*, 4> elementwise_state(const ParameterState& state);

// See has_shampoo_kernels().
bool has_entry(const ShampooHyperparameters& hyperparameters, const ShampooGroup& group,
               size_t param);

// Fills all but the places of blocks, `first_tile` and the gradient.
void fill_entry(cuda_kernels::ParameterEntry& entry, const ShampooHyperparameters& hyperparameters,
                const ShampooGroup& group, size_t param);
// `by_fours`: what fill_entry() found for all but the gradient.
void set_gradient(cuda_kernels::ParameterEntry& entry, const at::Tensor& grad, bool by_fours);

// block_size as the kernels count it.
int kernel_block_size(const ShampooHyperparameters& hyperparameters);
cuda_kernels::ElementRule element_rule(const ShampooHyperparameters& hyperparameters);

}  // namespace torchium::optim::detail
