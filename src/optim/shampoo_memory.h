// How much memory Shampoo takes, computed from the shapes of the parameters alone.
#pragma once

#include "optim/shampoo_step.h"
#include "torchium/optim/memory_report.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::optim::detail {

// Bytes of the state that parameters of one group will have after a step with a gradient for each.
StateMemory shampoo_state_memory(const ShampooHyperparameters& hyperparameters,
                                 at::TensorList params);

// Bytes that a step of one group allocates and frees again, at its peak, if all roots are due. An
// upper bound for contiguous parameters and gradients, on a GPU with the kernels and float32 state.
int64_t shampoo_step_temporaries(const ShampooHyperparameters& hyperparameters,
                                 at::TensorList params);

}  // namespace torchium::optim::detail
