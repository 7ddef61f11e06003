// The start of a step of any optimizer on a GPU: one look at all gradients, the decision whether
// the step is kept, and the step counts; and what its other kernels read of that.
#pragma once

#include "cuda_kernels/common/parameter_table.h"
#include "cuda_kernels/optimizer_step/step_rule.h"
#include "cuda_kernels/split_gemm/batched_product.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// Values of a step that exist only on the device.
struct StepControl {
  int first_unfit;  // index of the first parameter that the step cannot work with; INT_MAX: none
  bool keep;        // false: the step is skipped
  // Statistics L <- beta L + alpha g g^T. If the step is skipped, alpha is 0 and beta 1.
  GramUpdate update;
};

// Numbers of one parameter that depend on its step t and its gradient, and where that lies. Kernels
// find a gradient here and not in their arguments, so that one CUDA graph can replay all steps.
struct StepNumbers {
  double exp_avg;        // 1 - beta1^t
  double second_moment;  // of the grafted method
  double statistics;     // c = 1 - beta2^t
  double started;        // 1 from start_preconditioning_step on, else 0
  // Of g and m as fp16 parts (split_fp16.h).
  float gradient_scale, average_scale;
  unsigned largest[3];   // magnitudes of each ScanKind, as bits of floats
  unsigned is_examined;  // the gradient, before the step
  const void* gradient;
  int64_t gradient_stride;  // see GradientEntry
};

// The tensors that are scanned before a step.
enum class ScanKind : uint8_t { kGradient, kAverage, kParameter };

// A gradient, its average, or a parameter, of any shape. Its elements are neighbours, or lie in
// rows of `columns` neighbours, `row_stride` elements apart.
struct ScanEntry {
  const void* data;  // null: the gradient of the parameter, whose elements are neighbours
  int64_t elements;
  int first_tile;
  int index;  // of the parameter in the step
  ElementType type;
  ScanKind kind;
  // The step can work with magnitudes up to largest / sqrt(*step + 1) in gradients and parameters;
  // null: up to `largest`.
  const double* step;
  double largest;
  int columns = 0;  // 0: all are neighbours
  int64_t row_stride = 0;
};
constexpr int64_t kScanTile = 1 << 14;  // elements

// The step count of a parameter, and its value when an average began; null: 0.
struct StepEntry {
  double* step;
  const double* exp_avg_start;
  const double* second_moment_start;
};

// One tile each: entry i is of parameter first_tile + i.
struct GradientEntry {
  const void* data;
  int64_t row_stride;  // from a row to the next; 0: the gradient has the layout of the parameter
  // The largest magnitude in it, where the gradient was examined before the step; null: scan() is
  // to find it.
  const unsigned* largest;
};

// Sets `control` and the numbers of these parameters before their first use.
cudaError_t initialize_control(const Table<GradientEntry>& gradients, StepControl* control,
                               StepNumbers* numbers, cudaStream_t stream);

// Finds the first parameter that the step cannot work with, and the largest magnitudes of each.
cudaError_t scan(const Table<ScanEntry>& entries, StepControl* control, StepNumbers* numbers,
                 cudaStream_t stream);

// A tensor that is examined before a step begins. Its elements lie as those of a ScanEntry.
struct GivenEntry {
  const void* data;
  int64_t elements;
  int first_tile;
  int place;  // in `largest`
  int group, parameter;
  ElementType type;
  const double* step;  // see ScanEntry
  double limit;
  int columns;
  int64_t row_stride;
};

// unfit[group] becomes at least kMost (message_slots.h) minus a parameter with a tensor that does
// not fit, and largest[place] the largest magnitude of one that fits. Both begin as zeros.
cudaError_t examine(const Table<GivenEntry>& entries, int* unfit, unsigned* largest,
                    cudaStream_t stream);

// Decides whether the step is kept, counts it in `status` (step_rule.h) and fills the
// rest of `control`. status: [kStatusSize]. found_inf: a GradScaler's, on the device; not 0: the
// step is skipped, which counts in the total alone. May be null.
cudaError_t decide_step(const StepRule& rule, StepControl* control, const float* found_inf,
                        int64_t* status, cudaStream_t stream);

// t <- t + 1 where the step is kept, and the numbers of these parameters, after scan() has written
// `largest`. A parameter without a step has the numbers of t = 1.
cudaError_t advance_steps(const StepRule& rule, const Table<StepEntry>& steps,
                          const StepControl* control, StepNumbers* numbers, cudaStream_t stream);

struct LearningRate {
  const void* device;  // a float, or a double if is_double; null: the host knows it
  bool is_double;
  double host;
};

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
