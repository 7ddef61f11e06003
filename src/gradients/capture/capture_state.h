// The state that the callbacks of an OperatorCapture share.
#pragma once

#include "gradients/capture/operator_capture.h"
#include "gradients/capture/uncaptured_calls.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchium::gradients::detail {

// A gradient at the end of a backward pass.
struct SeenGradient {
  c10::weak_intrusive_ptr<at::TensorImpl> tensor;  // keeps the address from being reused
  int64_t version;
};

// A call between its forward and its backward pass.
struct PendingCall {
  std::weak_ptr<OperatorCapture::State> capture;
  LayerCall layer;
  std::shared_ptr<CallEdges> edges;
  uint32_t input_version = 0;  // of what the layer received, when it did
  int64_t outer_task = -1;     // the backward pass that ran this forward pass; -1: none
  std::vector<int64_t> output_sizes;
};
using PendingCalls = std::vector<std::shared_ptr<PendingCall>>;

struct OperatorCapture::State : public std::enable_shared_from_this<State> {
  State(const std::vector<at::Tensor>& params, Receiver receiver, bool takes_transposed);

  // Position of a parameter in the list; -1: not in it.
  int64_t position(const at::Tensor& param) const;
  // The same for a parameter that requires a gradient; otherwise -1.
  int64_t trainable_position(const at::Tensor& param) const;
  // Whether the current backward pass accumulates a gradient in the parameter at a position.
  bool is_accumulated(int64_t position) const;
  // The number of the current backward pass; `task` is its graph task.
  int64_t pass_of(int64_t task);
  // Records that a backward pass has reached the parameter at a position (or none, -1), and adds to
  // `gone` the finished passes whose gradient no longer exists: it is undefined or, with
  // may_be_zeroed, was set to zero.
  void arrive(int64_t position, int64_t pass, bool may_be_zeroed, std::vector<int64_t>& gone);
  // Records the end of a backward pass, and how it has left the gradients.
  void end_pass(int64_t pass);
  // Whether the gradient of the parameter at a position was changed since the last finished pass
  // and is zero; only then this waits for the device.
  bool was_zeroed(const at::Tensor& gradient, int64_t position);
  void note_gradient(const at::Tensor& gradient, int64_t position);
  // Records whether the current backward pass, with this number, mixes samples (mixed_samples.h).
  void look_for_mixed_samples(int64_t pass);
  // A call that has its gradient now.
  void receive(PendingCall& call, const at::Tensor& gradient);

  const Receiver receiver;
  const bool takes_transposed;
  // Weak references keep the addresses from being reused.
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> params;
  std::unordered_map<const at::TensorImpl*, int64_t> positions;

  std::mutex mutex;                             // for what follows
  std::unordered_map<int64_t, int64_t> passes;  // numbers of backward passes, by graph task
  std::set<int64_t> ended_passes;
  std::unordered_map<int64_t, std::set<int64_t>> passes_of_param;  // by position
  std::unordered_map<int64_t, SeenGradient> seen_gradients;        // by position
  std::exception_ptr error;
  int64_t processes = 1;  // the most that took part in an exchange
  UncapturedCalls uncaptured;
  std::set<int64_t> mixing_passes;          // backward passes that mix samples
  std::set<int64_t> tasks_seen_for_mixing;  // graph tasks that were checked for it
  // Without a receiver:
  PendingCalls calls;
  torch::autograd::edge_list outputs;  // of each
};

}  // namespace torchium::gradients::detail
