// How much memory Shampoo takes, computed from the shapes of the parameters alone.
#pragma once

#include "optim/shampoo/shampoo_step.h"
#include "torchium/optim/memory_report.h"

#include <ATen/core/Tensor.h>

namespace torchium::optim::detail {

// Bytes of the state that parameters of one group will have after a step with a gradient for each.
StateMemory shampoo_state_memory(const ShampooHyperparameters& hyperparameters,
                                 at::TensorList params);

}  // namespace torchium::optim::detail
