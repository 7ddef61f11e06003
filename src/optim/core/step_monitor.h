// Reads status tensors (step_status.h) on the host without waiting for the device.
#pragma once

#include "optim/core/step_status.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

using TensorVector = std::shared_ptr<const std::vector<at::Tensor>>;

// The report of one step or root computation.
struct StepReport {
  std::array<int64_t, kStatusSize> entries{};
  bool skipped = false;             // by a gradient that is not finite or too large
  TensorVector step_params;         // of the step; kNonFiniteParameter is a position in them
  TensorVector root_params;         // kFailedParameter is a position in them
  at::Tensor non_finite_parameter;  // undefined: none
  at::Tensor failed_parameter;      // undefined: none
};

// The status of the parameters of one group on one device. Every submitted status is reported once,
// in order. A status on a GPU is copied to pinned memory after the step, and read once the copy is
// complete.
class StepMonitor {
 public:
  explicit StepMonitor(c10::Device device);

  at::Tensor& status() { return status_; }

  // The parameters of the last step, and of the last call that could renew roots.
  void set_step_params(TensorVector params) { step_params_ = std::move(params); }
  void set_root_params(TensorVector params) { root_params_ = std::move(params); }

  // Queues a copy of the status after all work submitted so far.
  void submit();

  // The oldest report not yet returned. Without `wait`, only if its copy is complete.
  std::optional<StepReport> next(bool wait);

 private:
  struct Pending {
    StepReport report;  // without entries
    at::Tensor host;    // pinned; a copy on the CPU
    std::optional<c10::Event> event;
  };

  // The parameter that an index in the status refers to. The index is a position in the list of the
  // call that wrote it, so it is resolved when it changes and kept while later calls leave it.
  struct Culprit {
    int64_t count = -1;
    int64_t index = -1;
    at::Tensor param;
    void update(int64_t new_count, int64_t new_index, const TensorVector& params);
  };

  at::Tensor status_;
  Culprit non_finite_;
  Culprit failed_;
  TensorVector step_params_;
  TensorVector root_params_;
  int64_t total_skips_ = 0;
  std::deque<Pending> pending_;
  std::vector<at::Tensor> free_hosts_;
};

}  // namespace torchium::optim::detail
