// The first work of a step on a GPU: one look at all gradients, the decision whether the step is
// kept, and the step counts, in a few launches for all parameters. CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/shampoo_step.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/found_inf_guard.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <limits>
#include <vector>

namespace torchium::optim::detail {

// Keeps the tables of the kernels from step to step; memory is allocated for one step alone.
class DeviceCheck {
 public:
  // Step counts when averages began; undefined: 0.
  struct Starts {
    at::Tensor exp_avg, second_moment;
  };

  explicit DeviceCheck(at::TensorOptions options) : options_(options) {}

  // Adds the next parameter: its gradient is looked at, with an L2 penalty it too, and `step` is
  // counted.
  void add_parameter(const at::Tensor& param, double weight_decay, const at::Tensor& step,
                     const Starts& starts = {});
  // Looks at another tensor, which is dense and counts with parameter `param`. `step`: see
  // ScanEntry.
  void add_scan(const at::Tensor& tensor, size_t param, cuda_kernels::ScanKind kind, double largest,
                const double* step);
  // The gradient of this step; dense.
  void set_gradient(size_t param, const at::Tensor& grad);

  // status: see step_status.h. found_inf: one number, not 0: skip the step; undefined: 0.
  void run(const cuda_kernels::StepRule& rule, const at::Tensor& status, cudaStream_t stream,
           const at::Tensor& found_inf = {});
  // Frees the memory of the step.
  void end();

  // Between run() and end(). Closed where the step is skipped.
  FoundInfGuard guard() const;
  cuda_kernels::StepControl* control() const;
  cuda_kernels::StepNumbers* numbers() const;
  // One of StepNumbers, by its place there; 0-dim float64.
  at::Tensor number(size_t param, int64_t place) const;

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();
  struct Parameter {
    at::Tensor param, step;
    size_t gradient_scan = kNone;
    size_t copied_scan = kNone;  // of the parameter, where it is not dense
  };

  size_t add(int64_t elements, const cuda_kernels::ScanEntry& entry);

  at::TensorOptions options_;
  std::vector<Parameter> params_;
  KernelTables<cuda_kernels::ScanEntry> scans_;
  KernelTables<cuda_kernels::StepEntry> steps_;
  // Of one step.
  std::vector<at::Tensor> copies_;
  at::Tensor control_;  // StepControl
  at::Tensor numbers_;  // [P, kNumbers]: StepNumbers
};

}  // namespace torchium::optim::detail
