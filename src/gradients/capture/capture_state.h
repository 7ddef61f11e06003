// The state of a capture between forward and backward passes, of operators in C++
// (operator_capture.h) and of modules in Python (ops/module_capture.h).
#pragma once

#include "gradients/capture/backward_pass.h"
#include "gradients/capture/call_gradients.h"
#include "gradients/capture/uncaptured_calls.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace torchium::gradients::detail {

// A gradient at the end of a backward pass.
struct SeenGradient {
  c10::weak_intrusive_ptr<at::TensorImpl> tensor;  // keeps the address from being reused
  int64_t version;
};

class CaptureState;

// A layer of a model in Python.
struct ModuleLayer {
  int64_t number = -1;           // the caller's
  LayerCall call;                // kind, settings, eps and running statistics
  at::Tensor weight, bias;       // undefined: none
  std::vector<int64_t> padding;  // that the core does not add itself, as for at::pad()
  std::string padding_mode;
  bool adds_height = false;     // a convolution of one dimension, of images of height 1 in the core
  bool moves_channels = false;  // a norm of dimension 1, which is the last one in the core
  std::string text;             // in messages

  // An input or the gradient of an output, as the core takes it.
  at::Tensor in_core(const at::Tensor& tensor) const;
};

// A call between its forward and its backward pass.
struct PendingCall {
  std::weak_ptr<CaptureState> capture;
  LayerCall layer;                            // with the input, unless that is saved
  std::shared_ptr<const ModuleLayer> module;  // null: the call of an operator
  std::shared_ptr<CallEdges> edges;
  // The input as autograd keeps it: hooks of saved tensors may offload or recompute it.
  std::shared_ptr<const torch::autograd::SavedVariable> saved_input;
  uint32_t input_version = 0;  // of what the layer received, when it did
  BackwardPass outer;          // that ran this forward pass
  std::vector<int64_t> output_sizes;
  // Of attention, whose input and output have the rows [positions, samples]; 0: samples come first.
  int64_t inner_samples = 0;
  int64_t last_pass = -1;   // that has reached it; the captures that join passes count all, others
                            // those that accumulate gradients of its parameters
  int64_t last_period = 0;  // of the capture, when it did
};
using PendingCalls = std::vector<std::shared_ptr<PendingCall>>;

// The input and the gradient of the output as the core takes them.
at::Tensor core_input(const PendingCall& call, const at::Tensor& input);
at::Tensor core_gradient(const PendingCall& call, const at::Tensor& gradient);

// An input or the gradient of an output with its samples in dimension 0.
at::Tensor with_samples_first(const PendingCall& call, const at::Tensor& tensor);

// The edges of a call. Parameters without a position are undefined.
std::shared_ptr<CallEdges> edges_of(const std::shared_ptr<PendingCall>& call,
                                    const at::Tensor& input, const at::Tensor& weight,
                                    const at::Tensor& bias);

// Compiled autograd calls no hook of C++: raises NotImplementedError.
[[noreturn]] void refuse_compiled_autograd();

// The tensor whose hooks receive the gradient of `output` even if it is changed in place: for a
// view (of a product of more than two dimensions, for example) autograd then leaves out its own
// node. The gradient may have other sizes, with the elements in the same order.
at::Tensor tensor_to_hook(const at::Tensor& output);

class CaptureState : public std::enable_shared_from_this<CaptureState> {
 public:
  // Receives a call in the backward pass: OperatorCapture::Receiver.
  using Receiver = std::function<void(const PendingCall& pending, LayerCall call,
                                      const std::vector<int64_t>& gone_passes)>;

  // finds_mixing: whether to look for backward passes that mix samples.
  explicit CaptureState(const std::vector<at::Tensor>& params, Receiver receiver = nullptr,
                        bool finds_mixing = true);

  // ---- parameters

  void watch(const std::vector<at::Tensor>& params);
  // Position of a parameter in the list; -1: not in it, or undefined.
  int64_t position(const at::Tensor& param) const;
  // The same for a parameter that requires a gradient; otherwise -1.
  int64_t trainable_position(const at::Tensor& param) const;
  // Undefined if it is gone, or for -1.
  at::Tensor param(int64_t position) const;
  size_t size() const { return params_.size(); }

  // ---- calls

  // A call whose output was computed. is_received: the receiver is to get it.
  void add(const std::shared_ptr<PendingCall>& call, const at::Tensor& output, bool is_received);
  // Hands a call that has its gradient now to the receiver.
  void receive(PendingCall& call, const at::Tensor& gradient);
  // OperatorCapture::calls_of()
  std::vector<DifferentiableCall> calls_of(const at::Tensor& outputs);
  // The number of a backward pass in progress. With the mutex.
  int64_t pass_of(const BackwardPass& outer);
  // The number of the current backward pass; `outer` has run the forward pass. With the mutex.
  int64_t current_pass(const BackwardPass& outer);
  void forget();
  // The pass that it is joined to, or itself. With the mutex.
  int64_t first_pass(int64_t pass) const;
  // Whether the pass, or one that is joined to it, mixes samples. With the mutex.
  bool mixes_samples(int64_t pass) const;
  // Before state is loaded, which drops the calls of these passes and leaves their gradients.
  void warn_of_gradients_without_calls();

  std::mutex mutex;   // for what follows
  Receiver receiver;  // null: none
  // Called without the mutex when a backward pass, or a part of it, reaches its first call; other
  // calls of this state wait. Null: nothing.
  std::function<void()> on_start;
  // Whether passes that reach the same call are joined (LayerCall::first_pass). Otherwise the
  // second one causes a warning.
  bool joins_passes = false;
  UncapturedCalls uncaptured;
  std::set<int64_t> mixing_passes;  // backward passes that mix samples (mixed_samples.h)

 private:
  // For each call that a backward pass reaches: finds uses outside of calls, and calls on_start.
  void start(const PendingCall& call);
  // Whether the current backward pass accumulates a gradient in the parameter at a position.
  bool is_accumulated(int64_t position) const;
  // Records that a backward pass has reached the parameter at a position (or none, -1), and adds to
  // `gone` the finished passes whose gradient no longer exists: it is undefined or, with
  // may_be_zeroed, was set to zero.
  void arrive(int64_t position, int64_t pass, bool may_be_zeroed, std::vector<int64_t>& gone);
  // Records how a backward pass has left the gradients.
  void end_pass(int64_t pass);
  // Whether the gradient of the parameter at a position is what the last finished pass left.
  bool is_as_seen(const at::Tensor& gradient, int64_t position) const;
  // Whether the gradient of the parameter at a position was changed since the last finished pass
  // and is zero; only then this waits for the device.
  bool was_zeroed(const at::Tensor& gradient, int64_t position);
  void note_gradient(const at::Tensor& gradient, int64_t position);
  void look_for_mixed_samples(int64_t pass);
  // Warns once if an earlier pass, whose gradient still exists, has reached the call too.
  void look_for_second_pass(PendingCall& call, const LayerCall& layer);
  // Joins the pass to an earlier one that has reached the call too, and whose gradients still
  // exist.
  void join_passes(PendingCall& call, int64_t pass);
  // Whether a gradient that the pass has accumulated still exists; waits for the device only if it
  // was changed since.
  bool has_gradients(int64_t pass) const;

  const bool finds_mixing_;
  // Weak references keep the addresses from being reused.
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> params_;
  std::unordered_map<const at::TensorImpl*, int64_t> positions_;
  std::unordered_map<int64_t, int64_t> passes_;     // numbers of backward passes, by graph task
  std::vector<std::weak_ptr<const void>> running_;  // by number
  std::unordered_map<int64_t, std::set<int64_t>> passes_of_param_;  // by position
  std::unordered_map<int64_t, SeenGradient> seen_gradients_;        // by position
  std::set<int64_t> tasks_seen_for_mixing_;  // graph tasks that were checked for it
  std::mutex start_mutex_;                   // before the other one
  std::set<int64_t> started_tasks_;
  std::unordered_map<int64_t, int64_t> first_passes_;  // of passes that reach a call again
  int64_t period_ = 0;                                 // between two calls of forget()
  bool has_warned_ = false;
};

}  // namespace torchium::gradients::detail
