// The state that the callbacks of an OperatorCapture share.
#pragma once

#include "gradients/capture/capture_state.h"
#include "gradients/capture/operator_capture.h"

#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <exception>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torchium::gradients::detail {

struct OperatorCapture::State : public CaptureState {
  State(const std::vector<at::Tensor>& params, const OperatorCapture::Receiver& receive,
        bool takes_batch_norm)
      : CaptureState(params), is_differentiated(!receive), takes_batch_norm(takes_batch_norm) {
    if (receive) {
      receiver = [receive](const PendingCall&, LayerCall call, const std::vector<int64_t>& gone) {
        receive(std::move(call), gone);
      };
    }
  }

  const bool is_differentiated;  // without a receiver
  const bool takes_batch_norm;
  bool takes_registered_layers = false;

  std::unordered_set<int64_t> inner_samples;  // set_inner_samples()

  // With the mutex:
  std::exception_ptr error;
  int64_t processes = 1;  // the most that took part in an exchange
  // To be differentiated:
  PendingCalls calls;
  torch::autograd::edge_list outputs;  // of each
};

}  // namespace torchium::gradients::detail
