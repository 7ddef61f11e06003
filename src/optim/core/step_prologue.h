// How a step begins, for all of its parameters together: every gradient is examined, the step is
// kept or skipped, and counted.
#pragma once

#include "cuda_kernels/optimizer_step/step_rule.h"
#include "optim/core/found_inf_guard.h"
#include "optim/core/parameter_state.h"
#include "optim/core/step_graphs.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torchium::optim::detail {

using cuda_kernels::StepRule;

// Averages that begin at zero, whose bias is 1 - beta^t.
enum class Average : uint8_t { kGradient, kSecondMoment, kStatistics };

// t counts the steps since the average began; t = 0, of a first step that was skipped, counts as 1.
StepScalar bias_correction(double beta, const at::Tensor& step, const at::Tensor& start);

class StepPrologue {
 public:
  // For parameters on one device. With an L2 penalty, weight_decay, they are examined too. The
  // lists live as long as this.
  static std::unique_ptr<StepPrologue> make(const std::vector<at::Tensor>& params,
                                            const StateList& states, at::Tensor status,
                                            double weight_decay);
  virtual ~StepPrologue() = default;

  // Takes the gradients, one per parameter, until end(). Not part of a CUDA graph of the step.
  virtual void begin(at::TensorList grads) = 0;
  // Adds what the launches of a step depend on in these gradients, apart from where they lie.
  virtual void add_to(GraphKey&) const {}

  // t <- t + 1 of all parameters, unless a gradient is not finite or too large, or found_inf (one
  // number; undefined: 0) is not 0. False: the host knows that the step is skipped.
  virtual bool run(const StepRule& rule, const at::Tensor& found_inf) = 0;

  // Between run() and end(). Closed where the step is skipped.
  virtual FoundInfGuard guard() const = 0;
  // 1 - beta^t of one parameter.
  virtual StepScalar correction(Average average, size_t param) const = 0;

  // Frees the memory of the step.
  virtual void end() = 0;
};

}  // namespace torchium::optim::detail
