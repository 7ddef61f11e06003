// Constants of a step that the host and the kernels share.
#pragma once

#include <cstdint>

namespace torchium::cuda_kernels {

// Entries of the int64 tensor `status` [kStatusSize], on the parameters' device: what a step
// reports to the host. A step never reads it.
enum StepStatusEntry : int64_t {
  kConsecutiveSkips = 0,         // steps in a row skipped by a gradient not finite or too large
  kTotalSkips = 1,               // all skipped steps
  kNonFiniteParameter = 2,       // index (in the step's list) of the first such gradient, else -1
  kConsecutiveRootFailures = 3,  // largest count over all matrices of the group
  kFailedParameter = 4,          // index (in the step's list) of that matrix' parameter, else -1
  kStatusSize = 5,
};

// The numbers that the start of a step depends on. Coefficients of averages: 1 where no bias is
// corrected.
struct StepRule {
  double beta1 = 1.0;         // of the gradient
  double moment_beta = 1.0;   // of its second moment
  double beta2 = 1.0;         // of the statistics; 1: a plain sum
  double start = 1.0;         // the first step that is preconditioned
  double weight_decay = 0.0;  // L2
};

}  // namespace torchium::cuda_kernels
