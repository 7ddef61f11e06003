// Steps of AdaHessian (Yao et al. 2021, arXiv 2006.00719).
#pragma once

#include "optim/core/parameter_state.h"
#include "optim/core/step_prologue.h"
#include "torchium/optim/adahessian.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torchium::optim::detail {

// Of one parameter group on one device.
class AdaHessianStep : public PrologueStep {
 public:
  // Keeps the tensors, which stay the caller's, and the reference: numbers among the options may
  // change between steps.
  AdaHessianStep(const AdaHessianOptions& options, std::vector<at::Tensor> params, StateList states,
                 at::Tensor status);

  // Before run(): the new estimates, one per parameter; undefined: the one in the state stays.
  void set_diagonals(std::vector<at::Tensor> diagonals) { diagonals_ = std::move(diagonals); }

  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf) override;
  // Of each combination of new estimates.
  std::optional<GraphKey> graph_key(at::IntArrayRef host_steps) const override;
  // Those and the gradients.
  std::vector<at::Tensor> inputs() override;
  void set_inputs(at::TensorList inputs) override;
  void end() override;

 private:
  void update(size_t i, const FoundInfGuard& guard, const StepScalar& lr);

  const AdaHessianOptions& options_;
  std::vector<at::Tensor> params_;
  StateList states_;
  std::vector<at::Tensor> diagonals_;
};

}  // namespace torchium::optim::detail
