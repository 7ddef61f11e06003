#include "optim/core/group_plans.h"

#include "support/stream_capture.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::optim::detail {

at::Tensor LearningRate::of_step(double lr, c10::Device device, bool capturable) {
  if (!capturable) {
    return at::scalar_tensor(lr, at::kDouble);
  }
  // A replay would write this value again.
  TORCH_CHECK((on_device_.defined() && lr == value_) || !torchium::detail::is_capturing(device),
              "step() cannot be captured yet: lr has been set to ", lr,
              " since the last step, or capturable was off then; run a step before the capture");
  if (!on_device_.defined()) {
    on_device_ = at::full({}, lr, at::TensorOptions(at::kDouble).device(device));
    value_ = lr;
  }
  sync(lr);
  return on_device_;
}

void LearningRate::sync(double lr) {
  if (on_device_.defined() && lr != value_) {
    on_device_.fill_(lr);
    value_ = lr;
  }
}

GroupPlan* GroupPlans::find(size_t group, c10::Device device) {
  const auto found = std::find_if(plans.begin(), plans.end(), [&](const GroupPlan& each) {
    return each.group == group && each.plan->device() == device;
  });
  return found == plans.end() ? nullptr : &*found;
}

}  // namespace torchium::optim::detail
