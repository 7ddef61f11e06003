// The parts of a K-FAC step that every step takes, on a GPU in a few launches for all parameters
// (cuda_kernels/optimizer_step/kfac_step.h) and two or four products for all layers of one shape.
// On a CPU, and in a build without CUDA, there is none.
#pragma once

#include "optim/core/found_inf_guard.h"
#include "optim/kfac/kfac_step.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torchium::optim::detail {

class FusedKfac {
 public:
  // Null where the kernels do not know one of the parameters or layers: they need float32 state,
  // and parameters that are dense and, in a layer, contiguous, channels-last or a transposed
  // matrix. The arguments live as long as this.
  static std::unique_ptr<FusedKfac> make(const KfacHyperparameters& hyperparameters,
                                         at::TensorList params, at::TensorList grads,
                                         const std::vector<KfacLayer>& layers, KfacState& state);
  virtual ~FusedKfac() = default;

  // Looks at the gradients and at these sums, which are captured, and counts the step.
  virtual FoundInfGuard begin(const std::vector<Examined>& sums) = 0;
  // From the gradients to the new parameters.
  virtual void update() = 0;
};

}  // namespace torchium::optim::detail
