// The elementwise work of a Shampoo step on a GPU, for all parameters of a group at once: on the
// gradients before the matrix products, and on the directions after them. Symbols as in
// optim/shampoo/shampoo_step.cpp.
#pragma once

#include "cuda_kernels/optimizer_step/parameter_table.h"
#include "cuda_kernels/split_gemm/batched_product.h"

#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// Values of a step that exist only on the device.
struct StepControl {
  int first_unfit;  // index of the first parameter that the step cannot work with; INT_MAX: none
  bool keep;        // false: the step is skipped
  // Statistics L <- beta L + alpha g g^T. If the step is skipped, alpha is 0 and beta 1.
  GramUpdate update;
};

// Numbers of one parameter that depend on its step t and its gradient.
struct StepNumbers {
  double exp_avg;        // 1 - beta1^t
  double second_moment;  // of the grafted method
  double statistics;     // c = 1 - beta2^t
  double started;        // 1 from start_preconditioning_step on, else 0
  // Of g and m as fp16 parts (split_fp16.h).
  float gradient_scale, average_scale;
  unsigned largest[4];  // magnitudes of each ScanKind, as bits of floats; the last is padding
};

struct StepRule {
  double beta1, moment_beta, beta2;  // 1: no correction
  double start;                      // start_preconditioning_step
  double weight_decay;               // L2
};

// Sets `control` and the numbers of all parameters before their first use.
cudaError_t initialize_control(StepControl* control, StepNumbers* numbers, int parameters,
                               cudaStream_t stream);

// Finds the first parameter that the step cannot work with, and the largest magnitudes of each.
cudaError_t scan(const Table<ScanEntry>& entries, StepControl* control, StepNumbers* numbers,
                 cudaStream_t stream);

// Decides whether the step is kept, counts it in `status` (optim/core/step_status.h) and fills the
// rest of `control`. status: [5]. found_inf: a GradScaler's, on the device; not 0: the step is
// skipped, which counts in the total alone. May be null.
cudaError_t decide_step(const StepRule& rule, StepControl* control, const float* found_inf,
                        int64_t* status, cudaStream_t stream);

// t <- t + 1 where the step is kept, and the numbers of these parameters, after scan() has written
// `largest`. A parameter without a step has the numbers of t = 1.
cudaError_t advance_steps(const StepRule& rule, const Table<StepEntry>& steps,
                          const StepControl* control, StepNumbers* numbers, cudaStream_t stream);

struct ElementRule {
  int block_size;
  bool maximize;
  float weight_decay;  // L2, added to the gradient
  float decoupled_weight_decay;
  float beta1, moment_beta, diagonal_beta;
  float grafting_eps, diagonal_eps;
  float momentum;
  bool nesterov;
  bool grafting;  // otherwise a direction keeps its norm
};

// Buffers of one step. Partial sums of squares: one per tile.
struct StepBuffers {
  const StepControl* control;
  const StepNumbers* numbers;
  // Stacks of blocks of g, and of m unless that is g; of floats or fp16 parts.
  float *gradients, *averages;
  __half *gradients_hi, *gradients_lo;  // lo null: not asked for
  __half *averages_hi, *averages_lo;
  float *gradient_scales, *average_scales;  // [blocks of fp16 parts]
  const float* directions;                  // what the products made of m
  float* grafted_squares;
  float* direction_squares;
};

// Updates the averages and writes g and m to their blocks; zeros where the step is skipped. Sums
// the squares of f, and of d by the diagonal rule; none of those with Direction::kGrafted.
cudaError_t gather_gradients(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                             const StepBuffers& buffers, cudaStream_t stream);

// Sums the squares of the directions of parameters with matrices. For grafting alone.
cudaError_t sum_directions(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                           const StepBuffers& buffers, cudaStream_t stream);

struct LearningRate {
  const void* device;  // a float, or a double if is_double; null: the host knows it
  bool is_double;
  double host;
};

// Grafting, weight decay, momentum and p <- p - lr d.
cudaError_t update_parameters(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                              const StepBuffers& buffers, const LearningRate& lr,
                              cudaStream_t stream);

// The failures of consecutive matrices of one parameter.
struct FailureEntry {
  const int* failures;
  int matrices;
  int index;  // of the parameter in the step
};

// Writes the largest count of failures and its parameter to `status`; unless `is_first`, only where
// it is larger than what is there.
cudaError_t record_failures(const Table<FailureEntry>& entries, int64_t* status, bool is_first,
                            cudaStream_t stream);

}  // namespace torchium::cuda_kernels
