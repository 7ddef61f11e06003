// Arguments of a K-FAC step that do not fit together are refused before anything changes.
#pragma once

#include "optim/kfac/kfac_step.h"

namespace torchium::optim::detail {

// ValueError naming the argument, its value and what is needed.
void check_kfac_arguments(const KfacHyperparameters& hyperparameters, at::TensorList params,
                          at::TensorList grads, const std::vector<KfacLayer>& layers,
                          const KfacState& state);

}  // namespace torchium::optim::detail
