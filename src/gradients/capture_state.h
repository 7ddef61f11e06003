// What the callbacks of an OperatorCapture work on.
#pragma once

#include "gradients/operator_capture.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchium::gradients::detail {

// A use between its forward and its backward pass.
struct PendingUse {
  std::weak_ptr<OperatorCapture::State> capture;
  LayerUse layer;
  int64_t outer_task = -1;  // the backward pass that this forward pass is a part of
  std::vector<int64_t> output_sizes;
  std::shared_ptr<torch::autograd::Node>
      input_node;  // without a receiver: of the input, if it has one
};
using PendingUses = std::vector<std::shared_ptr<PendingUse>>;

struct OperatorCapture::State {
  State(const std::vector<at::Tensor>& params, Receiver receiver);

  // Position of a parameter in the list; -1: not in it.
  int64_t position(const at::Tensor& param) const;
  // The same of a parameter that gets a gradient.
  int64_t trainable_position(const at::Tensor& param) const;
  // Whether the current backward pass accumulates a gradient in the parameter at a position.
  bool is_accumulated(int64_t position) const;
  // Whether the parameter at a position (or none, -1) has no gradient now.
  bool has_no_gradient(int64_t position) const;
  // A use that has its gradient now.
  void receive(PendingUse& use, const at::Tensor& gradient);

  const Receiver receiver;
  // Weak references keep the addresses from being used again.
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> params;
  std::unordered_map<const at::TensorImpl*, int64_t> positions;

  std::mutex mutex;                                    // for what follows
  std::unordered_map<int64_t, int64_t> micro_batches;  // by backward pass (graph task)
  std::exception_ptr error;
  // Without a receiver:
  PendingUses uses;
  torch::autograd::edge_list outputs;  // of each
  // What an addition has made of the output of a use, with the output.
  std::vector<
      std::pair<std::shared_ptr<torch::autograd::Node>, std::shared_ptr<torch::autograd::Node>>>
      additions;
};

}  // namespace torchium::gradients::detail
