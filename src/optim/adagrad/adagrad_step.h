// Adagrad (Duchi, Hazan, Singer 2011, JMLR 12) with a diagonal or a block full-matrix accumulator.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/blocked/blocking.h"
#include "optim/core/parameter_state.h"
#include "optim/core/step_prologue.h"
#include "torchium/optim/adagrad.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torchium::optim::detail {

// One parameter at least, and a state for each.
struct AdagradGroup {
  std::vector<at::Tensor> params;
  StateList states;
  at::Tensor status;  // see step_status.h
};

struct AdagradRun {
  const AdagradOptions& options;
  const at::Tensor& lr;  // see PlannedStep
  at::TensorList grads;  // of all parameters of the group
  at::IntArrayRef host_steps;
  const StepPrologue& prologue;
};

// The step of a subset of the parameters. The group must outlive it.
class AdagradSubset {
 public:
  virtual ~AdagradSubset() = default;
  // From the gradients to the new parameters.
  virtual void update(const AdagradRun& run) = 0;
  // Adds what the launches of the next update depend on besides options and gradients. False: a
  // CUDA graph cannot hold them.
  virtual bool add_to(GraphKey&, at::IntArrayRef host_steps) const { return true; }
};

// The blocks of each parameter, flattened.
std::vector<Blocking> adagrad_blockings(at::TensorList params, int64_t block_size);

// Steps of one parameter group.
class AdagradStep : public PrologueStep {
 public:
  // The states fit the options (BlockedPlan::fit). Keeps the tensors of `group`, which stay the
  // caller's, and the reference: numbers among the options may change between steps.
  AdagradStep(const AdagradOptions& options, AdagradGroup group);
  AdagradStep(const AdagradStep&) = delete;
  AdagradStep& operator=(const AdagradStep&) = delete;

  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf) override;
  std::optional<GraphKey> graph_key(at::IntArrayRef host_steps) const override;

 private:
  const AdagradOptions& options_;
  AdagradGroup group_;
  std::vector<std::unique_ptr<AdagradSubset>> subsets_;
};

}  // namespace torchium::optim::detail
