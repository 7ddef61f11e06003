// The element-wise work of a Shampoo step on a GPU in a few launches for all parameters of a group
// (cuda_kernels/optimizer_step/shampoo_step.h). On a CPU, and in a build without CUDA, it serves no
// parameter.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/blocked/blocking.h"
#include "optim/core/found_inf_guard.h"
#include "optim/shampoo/shampoo_step.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torchium::optim::detail {

// 1 - beta^t of each parameter; 1 where nothing is to be corrected. Empty lists: not asked for.
struct Corrections {
  std::vector<StepScalar> exp_avg;
  std::vector<StepScalar> second_moment;  // of the grafted method
  std::vector<StepScalar> statistics;     // c
};

// Keeps the tables of the kernels from step to step; memory is allocated for one step alone.
class FusedStep {
 public:
  // Parameters, blockings and state live as long as this. The current device is that of the
  // parameters.
  FusedStep(const ShampooHyperparameters& hyperparameters, const std::vector<at::Tensor>& params,
            const std::vector<Blocking>& blockings, const ShampooState& state);
  ~FusedStep();
  FusedStep(const FusedStep&) = delete;
  FusedStep& operator=(const FusedStep&) = delete;

  // Whether this device has the kernels: only then may the step begin here, and only then do the
  // other methods anything.
  bool is_available() const { return work_ != nullptr; }
  // Parameters that the kernels serve: of order one or two, in a usual memory layout, with float32
  // state. The others take the path of elementwise.h. One flag a parameter.
  const std::vector<bool>& supports() const { return supports_; }
  bool supports(const MatrixBatch& batch) const { return supports_[batch.entries.front().param]; }
  bool supports_all() const { return supports_all_; }
  // Whether the kernels do all of the step, so that it launches the same every time.
  bool fits_graphs() const;

  // Fills the tables. The batches are those of all parameters and live as long as this.
  void plan(const ShampooHyperparameters& hyperparameters, const std::vector<MatrixBatch>& batches);

  // Looks for gradients that are not finite or too large, counts the step in the status and in
  // `steps`. The hyper-parameters live until end().
  void begin(const ShampooHyperparameters& hyperparameters, at::TensorList grads,
             const at::Tensor& found_inf);
  // Closed where the step is skipped.
  FoundInfGuard guard() const;
  // Of the parameters that it does not serve; with `statistics` those of all parameters.
  Corrections corrections(bool statistics) const;

  // One pass over the gradients, which fills the blocks of the batches that it serves.
  void gather();
  // L_i <- b2 L_i + (1 - b2) mat_i(g) mat_i(g)^T of the batches that it serves.
  void update_statistics();
  // d = m x_1 R_1 ... x_k R_k of the same.
  void precondition();
  // Grafting, momentum, weight decay, p <- p - lr d.
  void update();

  // Frees the memory of the step.
  void end();

 private:
  struct Work;
  std::vector<bool> supports_;
  bool supports_all_ = false;
  std::unique_ptr<Work> work_;
};

}  // namespace torchium::optim::detail
