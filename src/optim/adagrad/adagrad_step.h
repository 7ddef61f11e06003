// Adagrad (Duchi, Hazan, Singer 2011, JMLR 12) with a diagonal or a block full-matrix accumulator.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/blocked/blocking.h"
#include "optim/core/parameter_state.h"
#include "optim/core/step_plan.h"
#include "optim/core/step_prologue.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// Names and defaults are those of AdagradOptions and of Python's torchium.Adagrad. Its
// initial_accumulator_value belongs to the initial state alone.
struct AdagradHyperparameters {
  double lr_decay = 0.0;
  double weight_decay = 0.0;
  double eps = 1e-10;
  bool full_matrix = false;
  int64_t block_size = 128;
  int64_t update_freq = 1;
  std::string root_method = "eigh";  // "auto", "eigh" or "newton"
  bool maximize = false;
};

// One parameter at least, and a state for each.
struct AdagradGroup {
  std::vector<at::Tensor> params;
  StateList states;
  at::Tensor status;  // see step_status.h
};

struct AdagradRun {
  const AdagradHyperparameters& h;
  const at::Tensor& lr;  // see PlannedStep
  at::TensorList grads;  // of all parameters of the group
  at::IntArrayRef host_steps;
  const StepPrologue& prologue;
};

// Parameters whose steps are computed in one way. The group lives as long as this.
class AdagradSubset {
 public:
  virtual ~AdagradSubset() = default;
  // From the gradients to the new parameters.
  virtual void update(const AdagradRun& run) = 0;
};

// The blocks of the flattened parameter.
Blocking adagrad_blocking(const at::Tensor& param, int64_t block_size);

// Statistics initial_accumulator_value * I, identity roots; blocks of the flattened parameter.
BlockStorage adagrad_init_state(at::TensorList params, int64_t block_size,
                                double initial_accumulator_value);

// Steps of one parameter group, of the form that `full_matrix` names.
class AdagradStep : public PlannedStep {
 public:
  // Raises ValueError for state that does not fit. Keeps the tensors of `group`, which stay the
  // caller's.
  AdagradStep(AdagradHyperparameters hyperparameters, AdagradGroup group);
  AdagradStep(const AdagradStep&) = delete;
  AdagradStep& operator=(const AdagradStep&) = delete;

  // Takes other hyper-parameters; false if these need another plan.
  bool adopt(const AdagradHyperparameters& hyperparameters);

  void begin(std::vector<at::Tensor> grads) override;
  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf) override;
  void end() override;

 private:
  AdagradHyperparameters h_;
  AdagradGroup group_;
  std::unique_ptr<StepPrologue> prologue_;
  std::vector<std::unique_ptr<AdagradSubset>> subsets_;
};

}  // namespace torchium::optim::detail
