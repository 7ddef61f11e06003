// The parameters of a step of Shampoo, and the subsets of them whose steps are computed in one way:
// by operators of torch, or by the kernels of a GPU.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/blocked/blocking.h"
#include "optim/core/parameter_state.h"
#include "optim/core/step_prologue.h"
#include "optim/shampoo/shampoo_rules.h"
#include "optim/shampoo/shampoo_step.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace torchium::optim::detail {

// All lists have one entry per parameter.
struct ShampooGroup {
  std::vector<at::Tensor> params;
  StateList states;                 // what the hyper-parameters do not use is undefined
  std::vector<Blocking> blockings;  // without blocks where no matrices precondition
  std::vector<ParameterRule> rules;
};

// What the host decides about each parameter.
struct Schedule {
  std::vector<int64_t> due_steps;  // t where a root is due, else 0
  std::vector<bool> started;       // false: still the first steps, which use the grafted direction
  bool any_root_due = false;
};

struct ShampooRun {
  const ShampooHyperparameters& h;
  const at::Tensor& lr;  // see PlannedStep
  at::TensorList grads;  // of all parameters of the group
  const Schedule& schedule;
  const StepPrologue& prologue;
};

// Roots are not among its functions: those of all subsets are renewed together.
class ShampooSubset {
 public:
  virtual ~ShampooSubset() = default;

  // g: the gradient with weight decay; m <- b1 m + (1 - b1) g; the second moments v and a.
  virtual void moments(const ShampooRun& run) = 0;
  // L_i <- b2 L_i + (1 - b2) mat_i(g) mat_i(g)^T
  virtual void statistics(const ShampooRun& run) = 0;
  // d = m x_1 R_1 ... x_k R_k
  virtual void precondition(const ShampooRun& run) = 0;
  // Grafting, momentum, weight decay, p <- p - lr d.
  virtual void apply(const ShampooRun& run) = 0;
  // Frees the memory of the step.
  virtual void end() = 0;
};

// By operators of torch, on any device. `members`: positions in the group; `batches` are theirs.
// The group and the batches live as long as this.
std::unique_ptr<ShampooSubset> make_eager_subset(const ShampooGroup& group,
                                                 std::vector<size_t> members,
                                                 std::span<MatrixBatch> batches);

}  // namespace torchium::optim::detail
