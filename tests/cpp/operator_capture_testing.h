// A recorder of layer calls, and the gradients that one call accounts for.
#pragma once

#include "gradients/capture/operator_capture.h"
#include "optimizer_testing.h"

namespace torchium::testing {

using gradients::detail::LayerCall;
using gradients::detail::LayerKind;
using gradients::detail::OperatorCapture;

// An active capture of some parameters that stores its calls.
class Recorder {
 public:
  explicit Recorder(const Tensors& params)
      : capture_(params, [this](LayerCall call, const std::vector<int64_t>& gone) {
          calls.push_back(std::move(call));
          gone_passes = gone;
        }) {
    capture_.set_enabled(true);
  }
  OperatorCapture* operator->() { return &capture_; }

  std::vector<LayerCall> calls;
  std::vector<int64_t> gone_passes;  // from the last callback

 private:
  OperatorCapture capture_;
};

// The gradients of a linear layer from one of its calls.
inline torch::Tensor weight_gradient(const LayerCall& call) {
  const auto g = call.output_gradient.reshape({-1, call.output_gradient.size(-1)});
  const auto a = call.input.reshape({-1, call.input.size(-1)});
  return g.t().mm(a);
}
inline torch::Tensor bias_gradient(const LayerCall& call) {
  return call.output_gradient.reshape({-1, call.output_gradient.size(-1)}).sum(0);
}

inline void expect_explains(const LayerCall& call, const torch::Tensor& weight,
                            const torch::Tensor& bias) {
  EXPECT_EQ(call.kind, LayerKind::kLinear);
  EXPECT_FALSE(call.input.requires_grad());
  EXPECT_FALSE(call.output_gradient.requires_grad());
  if (weight.defined()) {
    expect_near(weight_gradient(call), weight.grad());
  }
  if (bias.defined()) {
    expect_near(bias_gradient(call), bias.grad());
  }
}

// The gradient with respect to a convolution's weight, from one of its calls.
inline torch::Tensor convolution_gradient(const LayerCall& call, const torch::Tensor& weight) {
  const auto& s = call.settings;
  const auto w = parameter(weight);
  const auto y = torch::conv2d(call.input, w, {}, {s[0], s[1]}, {s[2], s[3]}, {s[4], s[5]}, s[6]);
  return torch::autograd::grad({y}, {w}, {call.output_gradient})[0];
}

}  // namespace torchium::testing
