// The parameters of a step of Shampoo, and its stages for a subset of them: by PyTorch operators or
// by CUDA kernels.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/blocked/block_update.h"
#include "optim/core/parameter_state.h"
#include "optim/core/step_prologue.h"
#include "optim/shampoo/shampoo_rules.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace torchium::optim::detail {

// All lists have one entry per parameter.
struct ShampooGroup {
  Role role;
  std::vector<at::Tensor> params;
  StateList states;                 // undefined: not used by the options
  std::vector<Blocking> blockings;  // without blocks if no matrices precondition
  std::vector<ParameterRule> rules;
  std::vector<BlockUpdate> updates;
  bool defers = false;  // the updates change the parameters that the blocks are cut from

  size_t stage_count() const {
    return 1 + std::ranges::max(updates, {}, &BlockUpdate::stage).stage;
  }
};

// Decisions of the host, per parameter.
struct Schedule {
  std::vector<int64_t> due_steps;  // t if a root is due, else 0
  std::vector<bool> started;       // false: before start_preconditioning_step
  bool any_root_due = false;
};

struct ShampooRun {
  const ShampooOptions& options;
  const at::Tensor& lr;  // see PlannedStep
  at::TensorList grads;  // of all parameters of the group
  const Schedule& schedule;
  const StepPrologue& prologue;
  double decoupled_weight_decay;
};

// The roots of all subsets are renewed together, elsewhere.
class ShampooSubset {
 public:
  virtual ~ShampooSubset() = default;

  // g: the gradient with weight decay; m <- b1 m + (1 - b1) g; the second moments v and a.
  virtual void moments(const ShampooRun& run) = 0;
  // L_i <- b2 L_i + (1 - b2) mat_i(g) mat_i(g)^T
  virtual void statistics(const ShampooRun& run) = 0;
  // d = m x_1 R_1 ... x_k R_k, of the parameters of the stage, or of later ones too.
  virtual void precondition(const ShampooRun& run, size_t stage) = 0;
  // Grafting, momentum, weight decay, p <- p - lr d, of the same parameters.
  virtual void apply(const ShampooRun& run, size_t stage) = 0;
  // What apply() needs of the stages before it, where a graph has run these.
  virtual std::vector<at::Tensor> results() const { return {}; }
  virtual void set_results(const std::vector<at::Tensor>& results) {}
  // Frees the memory of the step.
  virtual void end() = 0;
};

// By PyTorch operators, on any device. `members`: positions in the group; `batches`: of the
// members. The group and the batches must outlive the subset.
std::unique_ptr<ShampooSubset> make_eager_subset(const ShampooGroup& group,
                                                 std::vector<size_t> members,
                                                 std::span<MatrixBatch> batches);

}  // namespace torchium::optim::detail
