// Adagrad (Duchi, Hazan, Singer 2011, JMLR 12) with a diagonal or a block full-matrix accumulator.
#pragma once

#include "optim/adagrad/cuda/fused_adagrad.h"
#include "optim/blocked/block_storage.h"
#include "optim/blocked/blocking.h"
#include "optim/core/step_plan.h"

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

// As ShampooState. `sums` belong to the diagonal form, the three matrix lists to the full one.
struct AdagradState {
  std::vector<at::Tensor> steps;
  std::vector<at::Tensor> sums;  // shape of the parameter
  std::vector<at::Tensor> statistics;
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> root_failures;
  at::Tensor status;
};

// Statistics initial_accumulator_value * I, identity roots; blocks of the flattened parameter.
BlockStorage adagrad_init_state(at::TensorList params, int64_t block_size,
                                double initial_accumulator_value);

// Steps of one parameter group, of the form that `full_matrix` names.
class AdagradStep : public PlannedStep {
 public:
  // Raises ValueError for state that does not fit. Keeps the tensors of `state`, which stay the
  // caller's.
  AdagradStep(AdagradHyperparameters hyperparameters, std::vector<at::Tensor> params,
              AdagradState state);

  // Takes other hyper-parameters; false if these need another plan.
  bool adopt(const AdagradHyperparameters& hyperparameters);

  void run(const at::Tensor& lr, at::TensorList grads, at::IntArrayRef host_steps,
           const at::Tensor& found_inf) override;

 private:
  AdagradHyperparameters h_;
  std::vector<at::Tensor> params_;
  AdagradState state_;
  std::vector<Blocking> blockings_;
  std::vector<MatrixBatch> batches_;     // refer to blockings_
  std::unique_ptr<FusedAdagrad> fused_;  // null: the operators of torch
};

}  // namespace torchium::optim::detail
