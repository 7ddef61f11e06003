// Diagonal Adagrad on a GPU, for all parameters of a group at once. Symbols as in
// optim/adagrad/adagrad_step.cpp.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// A parameter, its gradient (in StepNumbers) and its sum have one memory layout.
struct AdagradEntry {
  void* param;
  float* sum;
  const double* step;  // t, which counts this step
  int64_t elements;
  int first_tile;
  int index;  // of the parameter in the step
  ElementType param_type, grad_type;
  bool by_fours;  // all may be read four elements at a time
};
constexpr int64_t kAdagradTile = 1 << 13;  // elements

struct AdagradRule {
  bool maximize;
  float weight_decay;  // L2, added to the gradient
  float eps;
  double lr_decay;
};

// s <- s + g^2; p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps). Nothing where the step is
// skipped.
cudaError_t update_by_adagrad(const AdagradRule& rule, const Table<AdagradEntry>& parameters,
                              const StepControl* control, const StepNumbers* numbers,
                              const LearningRate& lr, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
