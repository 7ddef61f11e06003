// Parameters as the kernels of a fused step see them
// (cuda_kernels/optimizer_step/parameter_table.h). CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/shampoo_step.h"
#include "optim/blocked/blocking.h"
#include "optim/shampoo/shampoo_step.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

namespace torchium::optim::detail {

// State of the shape of one parameter; undefined where it has none.
struct ElementwiseState {
  at::Tensor exp_avg, second_moment, momentum_buffer, diagonal;

  std::array<const at::Tensor*, 4> all() const {
    return {&exp_avg, &second_moment, &momentum_buffer, &diagonal};
  }
};
std::vector<ElementwiseState> elementwise_states(const ShampooHyperparameters& hyperparameters,
                                                 const std::vector<Blocking>& blockings,
                                                 const ShampooState& state);

// Whether the kernels can take the parameter: of order one or two, in a usual memory layout that
// its state shares, with float32 state.
bool is_supported(const ShampooHyperparameters& hyperparameters, const at::Tensor& param,
                  const Blocking& blocking, const ElementwiseState& state);

// The gradient in a type that the kernels read, and in the layout of its parameter if that has an
// entry.
at::Tensor readable_gradient(const at::Tensor& grad, const at::Tensor& param, bool is_supported);

// Fills all but the places of blocks, `first_tile`, `index` and the gradient.
void fill_entry(cuda_kernels::ParameterEntry& entry, const ShampooHyperparameters& hyperparameters,
                const at::Tensor& param, const Blocking& blocking, const ElementwiseState& state);
// `by_fours`: what fill_entry() found for all but the gradient.
void set_gradient(cuda_kernels::ParameterEntry& entry, const at::Tensor& grad, bool by_fours);

cuda_kernels::ElementType element_type(at::ScalarType type);
bool same_layout(const at::Tensor& tensor, const at::Tensor& param);
// Four elements of `tensor`, which may be undefined, can be read at once.
bool aligned_to_four(const at::Tensor& tensor);
// Lets autograd know that a kernel has written to `tensor`, which may be undefined.
void note_change(const at::Tensor& tensor);

// The learning rate in a type that the kernels read, which must live until they are launched.
at::Tensor readable_learning_rate(const at::Tensor& lr);
cuda_kernels::LearningRate learning_rate(const at::Tensor& readable);

// block_size as the kernels count it.
int kernel_block_size(const ShampooHyperparameters& hyperparameters);
cuda_kernels::StepRule step_rule(const ShampooHyperparameters& hyperparameters);
cuda_kernels::ElementRule element_rule(const ShampooHyperparameters& hyperparameters);

}  // namespace torchium::optim::detail
