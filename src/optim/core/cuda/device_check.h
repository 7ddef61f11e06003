// The start of a step on a GPU: one look at all gradients, the decision whether the step is kept,
// and the step counts, in a few launches for all parameters. CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"
#include "optim/core/step_prologue.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cuda_runtime_api.h>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// What FoundInfGuard::check() writes to `status`, which is on a GPU. Returns whether the step is
// kept, 0-dim bool.
at::Tensor record_skip_by_kernels(const std::vector<Examined>& examined, at::Tensor& status,
                                  const at::Tensor& found_inf);

// Keeps the tables of the kernels from step to step, and what all of them read: in a CUDA graph
// that is replayed, the addresses of both stay the same.
class DeviceCheck : public StepPrologue {
 public:
  // Step counts when averages began; undefined: 0.
  struct Starts {
    at::Tensor exp_avg, second_moment;
  };

  // status: see step_status.h.
  DeviceCheck(at::TensorOptions options, at::Tensor status);

  // Adds the next parameter: its gradient is examined, and with an L2 penalty the parameter too,
  // and `step` is counted.
  void add_parameter(const at::Tensor& param, double weight_decay, const at::Tensor& step,
                     const Starts& starts = {});
  // Looks at another tensor, which is dense and belongs to parameter `param`. `step`: see
  // ScanEntry.
  void add_scan(const at::Tensor& tensor, size_t param, cuda_kernels::ScanKind kind, double largest,
                const double* step);
  // Kernels update this parameter: they need gradient(param) in its layout.
  void set_updated(size_t param) { params_[param].is_updated = true; }
  // They also read one whose rows lie apart, by GradientEntry::row_stride, if it is known().
  void set_reads_rows(size_t param) { params_[param].reads_rows = true; }

  void set_known(KnownMagnitudes known) override { known_ = std::move(known); }
  void begin(at::TensorList grads) override;
  void examine(const at::Tensor& tensor, size_t param, double largest) override;
  bool run(const StepRule& rule, const at::Tensor& found_inf) override;
  void end() override;
  std::vector<at::Tensor> kept_tensors() const override { return {kept_.control, kept_.numbers}; }

  FoundInfGuard guard() const override;
  StepScalar correction(Average average, size_t param) const override;
  cuda_kernels::StepControl* control() const;
  cuda_kernels::StepNumbers* numbers() const;
  // Of this step, as the kernels read it.
  const void* gradient(size_t param) const { return addresses_[param].data; }
  GradientKind gradient_kind(size_t param) const { return kinds_[param]; }
  void add_to(GraphKey& key) const override;

 private:
  struct Parameter {
    at::Tensor param, step;
    std::optional<size_t> gradient_scan = {};
    std::optional<size_t> copied_scan = {};  // of the parameter, where it is not dense
    bool is_updated = false, reads_rows = false;
  };

  struct Memory {
    at::Tensor control;  // StepControl
    at::Tensor numbers;  // [P, kNumbers]: StepNumbers
  };

  Memory allocate() const;
  void set_aside();

  at::TensorOptions options_;
  at::Tensor status_;
  std::vector<Parameter> params_;
  KernelTables<cuda_kernels::ScanEntry> scans_;
  KernelTables<cuda_kernels::StepEntry> steps_;
  KernelTables<cuda_kernels::GradientEntry> addresses_;
  Memory kept_;  // of all steps but those that a capture of the caller has in it
  std::optional<c10::cuda::CUDAStream> stream_;  // of the last step in kept_
  // Of one step.
  StepRule rule_;
  KnownMagnitudes known_;
  std::vector<at::Tensor> readable_, copies_;  // of gradients, and of parameters
  KernelTables<cuda_kernels::ScanEntry> examined_;
  std::vector<GradientKind> kinds_;
  Memory memory_;
};

}  // namespace torchium::optim::detail
