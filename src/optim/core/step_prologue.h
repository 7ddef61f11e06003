// The beginning of a step, for all of its parameters together: it examines every gradient, keeps or
// skips the step, and counts it.
#pragma once

#include "cuda_kernels/optimizer_step/step_rule.h"
#include "optim/core/found_inf_guard.h"
#include "optim/core/parameter_state.h"
#include "optim/core/step_plan.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

using cuda_kernels::StepRule;

// Averages that begin at zero, whose bias is 1 - beta^t.
enum class Average : uint8_t { kGradient, kSecondMoment, kStatistics };

// 1 - beta^t, with t the steps since the average began; t = 0, after a skipped first step, counts
// as 1.
StepScalar bias_correction(double beta, const at::Tensor& step, const at::Tensor& start);

class StepPrologue {
 public:
  // For parameters on one device, which are examined too if they have an L2 penalty, weight_decay.
  // `params` and `states` must outlive this object.
  static std::unique_ptr<StepPrologue> make(const std::vector<at::Tensor>& params,
                                            const StateList& states, at::Tensor status,
                                            double weight_decay);
  // With one penalty per parameter.
  static std::unique_ptr<StepPrologue> make(const std::vector<at::Tensor>& params,
                                            const StateList& states, at::Tensor status,
                                            const std::vector<double>& weight_decays);
  virtual ~StepPrologue() = default;

  // Before begin(): see KnownMagnitudes.
  virtual void set_known(KnownMagnitudes) {}
  // Takes the gradients, one per parameter, until end(). Not part of a CUDA graph of the step.
  virtual void begin(at::TensorList grads) = 0;
  // Adds the properties of the gradients, other than addresses, that the launches depend on.
  virtual void add_to(GraphKey&) const {}

  // Between begin() and run(): this step also examines `tensor`, which is dense, or on a GPU a
  // vector of any stride, and belongs to parameter `param`. Magnitudes up to `largest` fit.
  virtual void examine(const at::Tensor& tensor, size_t param, double largest) = 0;

  // t <- t + 1 of all parameters, unless a gradient is not finite or too large, an examined tensor
  // does not fit, or found_inf (one number; undefined: 0) is not 0. False: the host knows that the
  // step is skipped.
  virtual bool run(const StepRule& rule, const at::Tensor& found_inf) = 0;

  // Between run() and end().
  virtual FoundInfGuard guard() const = 0;
  // 1 - beta^t of one parameter.
  virtual StepScalar correction(Average average, size_t param) const = 0;

  // Frees the memory of the step.
  virtual void end() = 0;
  // What stays after it.
  virtual std::vector<at::Tensor> kept_tensors() const { return {}; }
};

// A planned step with a prologue, which its constructor makes.
class PrologueStep : public PlannedStep {
 public:
  void set_known(KnownMagnitudes known) override { prologue_->set_known(std::move(known)); }
  void begin(std::vector<at::Tensor> grads) override {
    PlannedStep::begin(std::move(grads));
    prologue_->begin(grads_);
  }
  void end() override {
    prologue_->end();
    PlannedStep::end();
  }
  std::vector<at::Tensor> kept_tensors() const override { return prologue_->kept_tensors(); }
  // Kernels find the addresses of gradients on the device; PyTorch's operators read copies.
  std::vector<at::Tensor> inputs() override;
  void set_inputs(at::TensorList inputs) override;

 protected:
  std::unique_ptr<StepPrologue> prologue_;
  std::vector<size_t> read_by_operators_;  // of the gradients
};

}  // namespace torchium::optim::detail
