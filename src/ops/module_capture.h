// Layer calls of modules in Python, for torch.classes.torchium: hooks of modules bring them, and
// everything else is as for operators in C++ (gradients/capture/capture_state.h).
#pragma once

#include "gradients/capture/call_gradients.h"
#include "gradients/capture/capture_state.h"
#include "gradients/capture/kept_calls.h"
#include "optim/capture/joint_plan.h"

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torchium::ops {

class ModuleCapture : public torch::CustomClassHolder {
 public:
  // keeps: whether calls are kept for calls(), with what is_mixed() and mixing_module() need.
  // Otherwise the operator backward_started gets the number of the capture when a backward pass
  // reaches its first layer.
  ModuleCapture(int64_t number, bool keeps);

  void watch(const std::vector<at::Tensor>& params);
  // Layers have numbers 0, 1, ... A layer may be described again.
  // row: of a call (gradients/capture/layer_call.h), whose kind and settings count; empty: not
  // known to the core. padding, adds_height, moves_channels: ModuleLayer. weight, bias: of its
  // calls; kept alive. mean, variance: the buffers of a batch norm that uses them; each call copies
  // them.
  void describe(int64_t number, const std::vector<int64_t>& row, double eps,
                std::vector<int64_t> padding, std::string padding_mode, bool adds_height,
                bool moves_channels, std::string text, const std::optional<at::Tensor>& weight,
                const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
                const std::optional<at::Tensor>& variance);
  // A call of a layer. Without is_received it only counts as no use outside of layers.
  // inner_samples: PendingCall.
  void add(const at::Tensor& output, const at::Tensor& input, int64_t number, bool is_received,
           int64_t inner_samples);
  // Adds the calls of layers on this thread that are products within another module, until
  // end_products(), which saves their inputs if that module has returned: attention. The inputs are
  // [positions, samples, width], perhaps flattened, with `samples` (0: not known) before an input
  // with three dimensions shows them. received: those of the layers whose calls are received.
  void begin_products(const std::vector<int64_t>& numbers, int64_t samples,
                      const std::vector<int64_t>& received);
  void end_products(bool has_returned);
  // A forward pass runs within a backward pass, perhaps without gradients.
  void enter_pass();
  // `output` comes from a module, with the caller's number, that has mixed samples.
  void add_mixing(const at::Tensor& output, int64_t number);

  // Hands further calls to a plan. Null: to none.
  void hand_to(c10::intrusive_ptr<optim::detail::JointPlan> plan);
  // Parameters that backward passes have reached outside of layers.
  std::vector<at::Tensor> used_outside();
  // The calls that `outputs` depends on, with parameters as positions in the plan.
  std::vector<gradients::detail::DifferentiableCall> calls_of(const at::Tensor& outputs,
                                                              const optim::detail::JointPlan& plan);
  void forget();
  void warn_of_gradients_without_calls();

  // Pass, number of the layer, input, output gradient, weight, bias (none: absent, or not reached)
  // and whether the input was changed since.
  using Call = std::tuple<int64_t, int64_t, at::Tensor, at::Tensor, std::optional<at::Tensor>,
                          std::optional<at::Tensor>, bool>;
  // The calls whose gradients `.grad` holds, by pass.
  std::vector<Call> calls();
  // The number of a module that has mixed the samples of one of these calls; -1: none did.
  int64_t mixing_module();
  // Whether a function has mixed them.
  bool is_mixed();

 private:
  // A call that no hook knows yet; null: no parameter of the layer is trained.
  std::shared_ptr<gradients::detail::PendingCall> pending_call(const at::Tensor& output,
                                                               const at::Tensor& input,
                                                               int64_t number,
                                                               int64_t inner_samples);

  // What the hooks of modules share with those of outputs.
  struct Kept {
    gradients::detail::KeptCalls calls;
    std::map<int64_t, int64_t> mixing;  // modules by pass
  };
  struct MixingHook;

  std::shared_ptr<gradients::detail::CaptureState> state_;
  // With the mutex of the state:
  std::shared_ptr<Kept> kept_;  // null: it keeps none
  std::vector<std::shared_ptr<const gradients::detail::ModuleLayer>> layers_;
};

}  // namespace torchium::ops
