// A step of diagonal Adagrad on a GPU in a few launches for all parameters
// (cuda_kernels/optimizer_step/adagrad_step.h). On a CPU, and in a build without CUDA, there is
// none.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torchium::optim::detail {

struct AdagradHyperparameters;
struct AdagradState;

class FusedAdagrad {
 public:
  // Null where the kernels do not know one of the parameters: they need dense ones, with float32
  // sums in the same memory layout. The current device is that of the parameters.
  static std::unique_ptr<FusedAdagrad> plan(const AdagradHyperparameters& hyperparameters,
                                            const std::vector<at::Tensor>& params,
                                            const AdagradState& state);
  virtual ~FusedAdagrad() = default;

  // The weight decay is that of the plan.
  virtual void run(const AdagradHyperparameters& hyperparameters, const at::Tensor& lr,
                   at::TensorList grads, const at::Tensor& found_inf) = 0;
};

}  // namespace torchium::optim::detail
