// The step of some parameters that NaturalGradientPlan keeps, launched or replayed.
#pragma once

#include "optim/core/step_plan.h"
#include "optim/natural_gradient/natural_gradient_step.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

namespace torchium::optim::detail {

class NaturalGradientPlannedStep : public PlannedStep {
 public:
  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf) override;
  std::optional<GraphKey> graph_key(at::IntArrayRef host_steps) const override;
  std::vector<at::Tensor> inputs() override;
  void set_inputs(at::TensorList inputs) override;
  std::vector<at::Tensor> results() const override;
  void set_results(at::TensorList results) override;

  // Of all steps.
  NaturalGradientHyperparameters options;
  std::vector<at::Tensor> params;
  NaturalGradientState state;

  bool is_reused = false;  // later steps may have the batch of this one
  bool captures_collectives = false;

  // Of the next one.
  CapturedBatch batch;   // empty: the step only counts
  bool is_kept = false;  // the batch lies in the state
  Solver solver;
  bool is_probing = false;  // conjugate gradients without a known number of iterations
  at::Tensor known_L;       // natural_gradient_step(): `factorization`; undefined: to be computed

  // Left by it.
  at::Tensor L;
  at::Tensor numbers;

 private:
  void for_each_input(const std::function<void(at::Tensor&)>& visit);
  std::vector<size_t> first_with_lr() const;
};

}  // namespace torchium::optim::detail
