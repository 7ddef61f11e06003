#include "optim/natural_gradient/iteration_budget.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

void IterationBudget::take_arrived() {
  if (!pending_ || !pending_->event.query()) {
    return;
  }
  const double* numbers = pending_->host.const_data_ptr<double>();
  const auto needed = static_cast<int64_t>(numbers[0]);
  const int64_t launched = pending_->launched;
  if (numbers[1] > pending_->tolerance) {
    known_ = 2 * launched;
  } else if (const int64_t enough = needed + needed / 4 + 8;
             launched < needed + needed / 8 + 4 || 3 * launched > 4 * enough) {
    known_ = enough;
  } else {
    known_ = launched;
  }
  pending_.reset();
}

int64_t IterationBudget::next(int64_t most, bool takes_arrived) {
  if (takes_arrived) {
    take_arrived();
  }
  launched_ = std::min(known_.value_or(most), most);
  return launched_;
}

void IterationBudget::submit(const at::Tensor& numbers, double tolerance) {
  if (numbers.is_cpu() || pending_) {
    return;
  }
  at::Tensor host = at::empty({2}, at::TensorOptions(at::kDouble).pinned_memory(true));
  host.copy_(numbers.narrow(0, 0, 2), /*non_blocking=*/true);
  c10::Event event(numbers.device().type());
  const c10::impl::VirtualGuardImpl guard(numbers.device().type());
  event.record(guard.getStream(numbers.device()));
  pending_.emplace(Pending{std::move(host), std::move(event), launched_, tolerance});
}

}  // namespace torchium::optim::detail
