#include "optim/core/step_monitor.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

void StepMonitor::Culprit::update(int64_t new_count, int64_t new_index,
                                  const TensorVector& params) {
  if (count == new_count && index == new_index) {
    return;
  }
  count = new_count;
  index = new_index;
  const bool known = params && index >= 0 && index < static_cast<int64_t>(params->size());
  param = known ? (*params)[index] : at::Tensor();
}

StepMonitor::StepMonitor(c10::Device device) {
  at::Tensor initial = at::zeros({kStatusSize}, at::kLong);
  initial[kNonFiniteParameter] = -1;
  initial[kFailedParameter] = -1;
  status_ = initial.to(device);
}

void StepMonitor::submit() {
  Pending pending;
  pending.report.step_params = step_params_;
  pending.report.root_params = root_params_;
  if (status_.is_cpu()) {
    pending.host = status_.clone();
  } else {
    if (free_hosts_.empty()) {
      free_hosts_.push_back(
          at::empty({kStatusSize}, at::TensorOptions(at::kLong).pinned_memory(true)));
    }
    pending.host = std::move(free_hosts_.back());
    free_hosts_.pop_back();
    pending.host.copy_(status_, /*non_blocking=*/true);
    pending.event.emplace(status_.device().type());
    const c10::impl::VirtualGuardImpl guard(status_.device().type());
    pending.event->record(guard.getStream(status_.device()));
  }
  pending_.push_back(std::move(pending));
}

std::optional<StepReport> StepMonitor::next(bool wait) {
  if (pending_.empty()) {
    return std::nullopt;
  }
  Pending& pending = pending_.front();
  if (pending.event.has_value()) {
    if (wait) {
      pending.event->synchronize();
    } else if (!pending.event->query()) {
      return std::nullopt;
    }
  }
  StepReport report = std::move(pending.report);
  std::copy_n(pending.host.const_data_ptr<int64_t>(), report.entries.size(),
              report.entries.begin());
  const auto& entries = report.entries;
  report.skipped = entries[kTotalSkips] > std::exchange(total_skips_, entries[kTotalSkips]);
  non_finite_.update(entries[kTotalSkips], entries[kNonFiniteParameter], report.step_params);
  failed_.update(entries[kConsecutiveRootFailures], entries[kFailedParameter], report.root_params);
  report.non_finite_parameter = non_finite_.param;
  report.failed_parameter = failed_.param;
  if (pending.event.has_value()) {
    free_hosts_.push_back(std::move(pending.host));
  }
  pending_.pop_front();
  return report;
}

}  // namespace torchium::optim::detail
