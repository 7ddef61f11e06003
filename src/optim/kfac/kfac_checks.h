// State that does not fit its parameters is refused before a step.
#pragma once

#include "optim/kfac/kfac_step.h"

namespace torchium::optim::detail {

// ValueError naming the tensor, what it is and what is needed.
void check_kfac_state(const KfacHyperparameters& hyperparameters, at::TensorList params,
                      const std::vector<KfacLayer>& layers, const KfacState& state);

}  // namespace torchium::optim::detail
