// The host's side of the status tensors (step_status.h): reads them without waiting for the device.
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

// What one call of the core reported.
struct StepReport {
  std::array<int64_t, kStatusSize> entries{};
  bool skipped = false;             // this step, by a gradient not finite or too large
  TensorVector step_params;         // the parameters of the step, what kNonFiniteParameter counts
  TensorVector root_params;         // what kFailedParameter counts
  at::Tensor non_finite_parameter;  // undefined: none
  at::Tensor failed_parameter;      // undefined: none
};

// The status of the parameters of one group on one device. Every submitted status is reported once,
// in order. Off the CPU it is copied to pinned memory behind the step, and read when it has
// arrived.
class StepMonitor {
 public:
  explicit StepMonitor(c10::Device device);

  at::Tensor& status() { return status_; }

  // Takes note of the parameters of the last step, and of the last call that could renew roots.
  void set_step_params(TensorVector params) { step_params_ = std::move(params); }
  void set_root_params(TensorVector params) { root_params_ = std::move(params); }

  // Queues a copy of the status as the work submitted so far leaves it.
  void submit();

  // The oldest report not yet returned; none if there is none, or (unless `wait`) none has arrived.
  std::optional<StepReport> next(bool wait);

 private:
  struct Pending {
    StepReport report;  // without entries
    at::Tensor host;    // pinned; a copy on the CPU
    std::optional<c10::Event> event;
  };

  // The parameter that a count and an index in the status mean. The index counts in the list of the
  // call that wrote it, so it is looked up when it changes and kept while later calls leave it.
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
