// Captures the layer calls of a C++ model without changes to the model: a global RecordFunction
// callback observes operators with a parameter among their operands and hooks their outputs.
#pragma once

#include "gradients/capture/call_gradients.h"
#include "gradients/capture/layer_call.h"
#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace torchium::gradients::detail {

// Captures the calls of some parameters by these operators, called directly or by torch::nn:
//   linear, addmm, matmul, mm (whose operand is the whole transpose of the parameter, or the
//   parameter itself; a bias is addmm's first operand or what is added in place to the product),
//   conv1d to conv3d and their transposed forms, convolution, embedding, layer_norm,
//   native_layer_norm, rms_norm, group_norm, native_group_norm, and batch_norm if asked for.
// The input [samples * positions, in] of a product with a parameter itself is captured as [samples,
// positions, in] if it is a view of such a tensor.
// A call counts if gradients are recorded and reach the parameter. Dimension 0 of the input is the
// sample. An operator within one of these, or within a recurrent layer (lstm, gru, ...), does not
// count: there dimension 0 may be something else.
//
// Forward passes may run on any thread. The callback is registered only while some capture is
// enabled, because it costs every operator a few hundred nanoseconds.
class TORCHIUM_API OperatorCapture {
 public:
  // Receives one call in the backward pass, on its thread, once the gradient of the layer's output
  // is known. One call at a time. An exception propagates out of the backward pass.
  // `call`: weight and bias are positions in the list of the capture; -1: not there, frozen, or not
  // accumulated by this backward pass. The micro-batch counts the backward passes.
  // `gone_passes`: finished backward passes of the weight or bias whose gradient no longer exists:
  // it was undefined, or had been set to zero, when this pass reached them. Each is listed once for
  // the weight and once for the bias.
  using Receiver = std::function<void(LayerCall call, const std::vector<int64_t>& gone_passes)>;

  // Without a receiver the calls are kept for differentiate(). Disabled at first.
  // takes_batch_norm: whether calls of batch_norm are captured, which mix samples in training mode.
  // joins_passes: see CaptureState.
  explicit OperatorCapture(const std::vector<at::Tensor>& params,
                           const Receiver& receiver = nullptr, bool takes_batch_norm = false,
                           bool joins_passes = false);
  ~OperatorCapture();
  OperatorCapture(const OperatorCapture&) = delete;
  OperatorCapture& operator=(const OperatorCapture&) = delete;

  // Whether these are its parameters, in this order.
  bool watches(const std::vector<at::Tensor>& params) const;
  // Parameters, by their positions, of layers that receive [positions, samples, width].
  void set_inner_samples(const std::vector<int64_t>& params);
  // Calls of layers with a formula count as such (registered_layer.h), and not their operators.
  void take_registered_layers();
  // Whether forward passes are captured from now on.
  void set_enabled(bool enabled);
  // Counts micro-batches from zero again. The outputs of earlier forward passes stay hooked.
  void forget();
  // Before state is loaded, if there were backward passes since forget().
  void warn_of_gradients_without_calls();
  // How many processes have exchanged tensors since forget(), while some capture was enabled; 1:
  // none that was seen (collectives.h).
  int64_t processes() const;
  // Whether backward passes have reached the parameter outside of captured calls
  // (uncaptured_calls.h).
  bool is_used_otherwise(const at::Tensor& param) const;
  // Whether a backward pass has gone through a normalisation with the statistics of
  // the batch, as a function call or a module (mixed_samples.h).
  bool mixes_samples(int64_t pass) const;
  // Rethrows, once, an exception that occurred while forward passes were observed.
  void raise_error();
  // With a receiver: the calls that `outputs` depends on, without gradients. c10::Error if the
  // input of one was changed in place, or freed by a backward pass that did not retain the graph.
  std::vector<DifferentiableCall> calls_of(const at::Tensor& outputs) const;
  // Without a receiver: the position of a parameter that `loss` depends on outside of the calls so
  // far; -1: there is none.
  int64_t parameter_used_otherwise(const at::Tensor& loss) const;
  // Without a receiver: whether the input of a layer was changed in place afterwards.
  bool has_overwritten_input() const;
  // Without a receiver: all calls so far, as one micro-batch, with the gradients of the sum of
  // `losses`, each times its factor if given, by their outputs; undefined where the losses do not
  // depend on them, and without losses. Nothing is accumulated in `.grad`, and no gradient by a
  // parameter is computed. Frees the graph and forgets the calls, unless `keep`.
  std::vector<LayerCall> differentiate(const at::Tensor& losses = {},
                                       const at::Tensor& factors = {}, bool keep = false);

  struct State;

 private:
  std::shared_ptr<State> state_;
  bool is_enabled_ = false;
};

}  // namespace torchium::gradients::detail
