#include "optim/step_monitor.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

at::Tensor find_param(const TensorVector& params, int64_t index) {
  const bool known = params && index >= 0 && index < static_cast<int64_t>(params->size());
  return known ? (*params)[index] : at::Tensor();
}

}  // namespace

at::Tensor StepReport::non_finite_parameter() const {
  return find_param(step_params, entries[kNonFiniteParameter]);
}

at::Tensor StepReport::failed_parameter() const {
  return find_param(root_params, entries[kFailedParameter]);
}

StepMonitor::StepMonitor(c10::Device device) {
  at::Tensor initial = at::zeros({kStatusSize}, at::kLong);
  initial[kNonFiniteParameter] = -1;
  initial[kFailedParameter] = -1;
  status_ = initial.to(device);
}

void StepMonitor::submit() {
  Pending pending{{{}, false, step_params_, root_params_}, {}, std::nullopt};
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
  report.skipped =
      report.entries[kTotalSkips] > std::exchange(total_skips_, report.entries[kTotalSkips]);
  if (pending.event.has_value()) {
    free_hosts_.push_back(std::move(pending.host));
  }
  pending_.pop_front();
  return report;
}

}  // namespace torchium::optim::detail
