// The learning rate of a parameter group of a C++ optimizer, as a step takes it.
#pragma once

#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace torchium::optim::detail {

class DeviceLearningRate {
 public:
  // 0-dim float64: on the CPU, or in a tensor on `device` that captured steps read.
  at::Tensor of_step(double lr, c10::Device device, bool capturable) {
    if (!capturable) {
      return at::scalar_tensor(lr, at::kDouble);
    }
    // A replay would write this value again.
    TORCH_CHECK((on_device_.defined() && lr == value_) || !torchium::detail::is_capturing(device),
                "step() cannot be captured yet: lr has been set to ", lr,
                " since the last step, or capturable was off then; run a step before the capture");
    if (!on_device_.defined() || on_device_.device() != device) {
      on_device_ = at::full({}, lr, at::TensorOptions(at::kDouble).device(device));
      value_ = lr;
    }
    sync(lr);
    return on_device_;
  }

  // Writes `lr` to the tensor on the device, if there is one.
  void sync(double lr) {
    if (on_device_.defined() && lr != value_) {
      on_device_.fill_(lr);
      value_ = lr;
    }
  }

 private:
  at::Tensor on_device_;
  double value_ = 0.0;
};

}  // namespace torchium::optim::detail
