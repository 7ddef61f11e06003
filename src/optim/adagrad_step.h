// Adagrad (Duchi, Hazan, Singer 2011, JMLR 12) with a diagonal or a block full-matrix accumulator.
#pragma once

#include "optim/stacks.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// Names and defaults are those of AdagradOptions and of Python's torchium.Adagrad. Its
// initial_accumulator_value belongs to the initial state alone.
struct AdagradHyperparameters {
  at::Tensor lr;  // 0-dim; float64 on the CPU, or on the parameters' device
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
MatrixStacks adagrad_init_state(at::TensorList params, int64_t block_size,
                                double initial_accumulator_value);

// One step of one parameter group, of the form that `hyperparameters.full_matrix` names.
void adagrad_step(const AdagradHyperparameters& hyperparameters, at::TensorList params,
                  at::TensorList grads, AdagradState& state, at::IntArrayRef host_steps);

}  // namespace torchium::optim::detail
