#include "optim/group_runtime.h"

#include "support/stream_capture.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {

at::Tensor GroupRuntime::learning_rate(double lr, bool capturable) {
  if (!capturable) {
    return at::scalar_tensor(lr, at::kDouble);
  }
  // A replay would write this value again.
  TORCH_CHECK((lr_.defined() && lr == lr_value_) || !torchium::detail::is_capturing(device_),
              "step() cannot be captured yet: lr has been set to ", lr,
              " since the last step, or capturable was off then; run a step before the capture");
  if (!lr_.defined()) {
    lr_ = at::full({}, lr, at::TensorOptions(at::kDouble).device(device_));
    lr_value_ = lr;
  }
  sync_learning_rate(lr);
  return lr_;
}

void GroupRuntime::sync_learning_rate(double lr) {
  if (lr_.defined() && lr != lr_value_) {
    lr_.fill_(lr);
    lr_value_ = lr;
  }
}

GroupRuntime& GroupRuntimes::at(size_t group, c10::Device device) {
  const Key key{group, static_cast<int>(device.type()), device.index()};
  return runtimes_.try_emplace(key, group, device).first->second;
}

}  // namespace torchium::optim::detail
