#include "gradients/capture/model_layers.h"
#include "gradients/capture/operator_capture.h"
#include "gradients/jacobian/jacobian.h"
#include "gradients/per_sample/sample_checks.h"
#include "torchium/gradients.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace torchium {
namespace {

using gradients::detail::LayerCall;
using gradients::detail::ModelLayers;
using gradients::detail::OperatorCapture;

// Calls restore(), which may throw. For destructors, which reach it only while another error is in
// flight: that one is reported.
template <typename Kept>
void restore_quietly(Kept& kept) noexcept {
  try {
    kept.restore();
  } catch (...) {
  }
}

// Restores the values of buffers, which modules may change, for example to count calls.
class KeptBuffers {
 public:
  explicit KeptBuffers(const torch::nn::Module& model) {
    for (const auto& buffer : model.buffers()) {
      kept_.push_back({buffer, buffer.detach().clone(), buffer._version()});
    }
  }
  ~KeptBuffers() { restore_quietly(*this); }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

  // Between passes, and at the end. A graph that has saved a buffer can then no longer be used.
  void restore() {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, value, version] : kept_) {
      if (buffer._version() != version) {
        buffer.copy_(value);
        version = buffer._version();
      }
    }
  }

 private:
  struct Entry {
    at::Tensor buffer;
    at::Tensor value;
    int64_t version;
  };
  std::vector<Entry> kept_;
};

// An order for std::set.
struct DeviceOrder {
  bool operator()(c10::Device a, c10::Device b) const {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  }
};
using DeviceSet = std::set<c10::Device, DeviceOrder>;

// Whether an operator of this thread was given a generator of random numbers.
thread_local bool took_generator = false;

std::unique_ptr<at::ObserverContext> look_for_generator(const at::RecordFunction& function) {
  for (const auto& input : function.inputs()) {
    took_generator |= input.isGenerator();
  }
  return nullptr;
}

// Restores the state of the default generators of random numbers, and watches for others.
class KeptRandomState {
 public:
  explicit KeptRandomState(const DeviceSet& devices) {
    for (const c10::Device device : devices) {
      generators_.push_back(at::globalContext().defaultGenerator(device));
    }
    states_ = read();
    took_generator = false;
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&look_for_generator)
                                               .needsInputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }
  ~KeptRandomState() {
    at::removeCallback(callback_);
    restore_quietly(*this);
  }
  KeptRandomState(const KeptRandomState&) = delete;
  KeptRandomState& operator=(const KeptRandomState&) = delete;

  void restore() {
    for (const auto i : c10::irange(generators_.size())) {
      const std::lock_guard lock(generators_[i].mutex());
      generators_[i].set_state(states_[i]);
    }
  }

  bool has_drawn() {
    if (took_generator) {
      return true;
    }
    const auto now = read();
    for (const auto i : c10::irange(now.size())) {
      if (!at::equal(now[i], states_[i])) {
        return true;
      }
    }
    return false;
  }

 private:
  std::vector<at::Tensor> read() {
    std::vector<at::Tensor> states;
    for (auto& generator : generators_) {
      const std::lock_guard lock(generator.mutex());
      states.push_back(generator.get_state());
    }
    return states;
  }

  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
  at::CallbackHandle callback_;
};

void check_batch(const at::Tensor& inputs, const at::Tensor& targets) {
  TORCH_CHECK_VALUE(inputs.defined() && inputs.dim() > 0 && targets.defined() && targets.dim() > 0,
                    "inputs and targets must be tensors with a batch dimension");
  TORCH_CHECK_VALUE(inputs.size(0) == targets.size(0) && inputs.size(0) > 0, "inputs hold ",
                    inputs.size(0), " samples and targets ", targets.size(0),
                    "; there must be equally many, at least one");
}

// What is differentiated.
struct SampleLoss {
  const torch::nn::Module& model;
  const ForwardFunction& forward;
  const LossFunction& loss_fn;

  at::Tensor of(const at::Tensor& output, const at::Tensor& target) const {
    const at::Tensor loss = loss_fn(output, target);
    TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "loss_fn returned shape ",
                      loss.defined() ? loss.sizes() : at::IntArrayRef(),
                      " for one sample; it must return one number, e.g. a mean or a sum");
    return loss.reshape({});
  }

  // Of each sample: [batch].
  at::Tensor of_each(const at::Tensor& output, const at::Tensor& targets) const {
    std::vector<at::Tensor> losses;
    for (const auto i : c10::irange(targets.size(0))) {
      losses.push_back(of(output.narrow(0, i, 1), targets.narrow(0, i, 1)));
    }
    return at::stack(losses);
  }
};

at::Tensor captured_output(OperatorCapture& capture, const SampleLoss& loss,
                           const at::Tensor& inputs) {
  capture.set_enabled(true);
  at::Tensor output = loss.forward(inputs);
  capture.set_enabled(false);
  capture.raise_error();
  return output;
}

// Sets the calls of one pass over all samples. Returns why dimension 0 of the captured tensors may
// not be the sample; empty: it is.
std::string capture_samples(OperatorCapture& capture, const SampleLoss& loss,
                            const at::Tensor& inputs, const at::Tensor& targets,
                            const std::vector<std::string>& names, KeptBuffers& buffers,
                            std::vector<LayerCall>& calls) {
  const int64_t samples = inputs.size(0);
  const at::Tensor output = captured_output(capture, loss, inputs);
  if (output.dim() == 0 || output.size(0) != samples) {
    return c10::str("forward returned shape ", output.sizes(), " for ", samples, " samples");
  }
  const at::Tensor losses = loss.of_each(output, targets);
  const int64_t other = capture.parameter_used_otherwise(losses);
  if (other >= 0) {
    return c10::str("the loss depends on '", names[other],
                    "' not only by the operators that are captured (linear, conv2d, embedding, "
                    "layer_norm, group_norm), with the parameter itself");
  }
  if (capture.has_overwritten_input()) {
    return "the input of a layer was changed in place";
  }
  calls = capture.differentiate(losses, {}, /*keep=*/samples > 1);
  for (const LayerCall& call : calls) {
    if (gradients::detail::samples_of(call) != samples) {
      return c10::str("the layer of '", names[call.weight >= 0 ? call.weight : call.bias],
                      "' received ", call.input.sizes(), " for ", samples, " samples");
    }
  }
  if (samples == 1) {
    return "";
  }
  const at::Tensor factors = gradients::detail::sample_factors(samples, losses.options());
  const auto scaled = capture.differentiate(losses, factors);
  if (!gradients::detail::are_scaled(calls, scaled, factors)) {
    return "rows of a layer depend on the losses of other samples";
  }
  buffers.restore();
  const at::Tensor first = captured_output(capture, loss, inputs.narrow(0, 0, 1));
  const at::Tensor first_loss = loss.of(first, targets.narrow(0, 0, 1));
  if (!gradients::detail::begin_with(calls, capture.differentiate(first_loss))) {
    return "layers receive another first sample when it is alone";
  }
  buffers.restore();
  const at::Tensor rolled = captured_output(capture, loss, inputs.roll(1, 0));
  const auto rolled_calls = capture.differentiate();
  if (!gradients::detail::are_rolled(calls, rolled_calls) ||
      !gradients::detail::rows_agree(rolled, output.roll(1, 0))) {
    return "layers receive another sample when it has another place in the batch";
  }
  return "";
}

std::vector<at::Tensor> zero_rows(const std::vector<at::Tensor>& params, int64_t samples) {
  std::vector<at::Tensor> rows;
  for (const auto& param : params) {
    auto shape = param.sizes().vec();
    shape.insert(shape.begin(), samples);
    rows.push_back(at::zeros(shape, param.options().requires_grad(false)));
  }
  return rows;
}

// `rows` must be zero.
void set_rows_one_by_one(std::vector<at::Tensor>& rows, const SampleLoss& loss,
                         const std::vector<at::Tensor>& params, const at::Tensor& inputs,
                         const at::Tensor& targets) {
  KeptBuffers buffers(loss.model);
  for (const auto i : c10::irange(inputs.size(0))) {
    buffers.restore();
    const at::Tensor value = loss.of(loss.forward(inputs.narrow(0, i, 1)), targets.narrow(0, i, 1));
    if (!value.requires_grad()) {
      continue;
    }
    const auto found = torch::autograd::grad({value}, params, /*grad_outputs=*/{},
                                             /*retain_graph=*/std::nullopt,
                                             /*create_graph=*/false, /*allow_unused=*/true);
    for (const auto p : c10::irange(params.size())) {
      if (found[p].defined()) {
        rows[p][i].copy_(found[p].is_sparse() ? found[p].to_dense() : found[p]);
      }
    }
  }
  buffers.restore();
}

}  // namespace

torch::OrderedDict<std::string, at::Tensor> per_sample_gradients(const torch::nn::Module& model,
                                                                 const ForwardFunction& forward,
                                                                 const LossFunction& loss_fn,
                                                                 const at::Tensor& inputs,
                                                                 const at::Tensor& targets) {
  check_batch(inputs, targets);
  const ModelLayers layers(model);
  layers.refuse_mixed_samples();
  std::vector<at::Tensor> params;
  std::vector<std::string> names;
  DeviceSet devices{at::kCPU, inputs.device()};
  std::string reason;  // for one pass per sample
  for (const auto& [param, place] : layers.parameters()) {
    if (!param.requires_grad()) {
      continue;
    }
    if (reason.empty() && !place->problem.empty()) {
      reason = place->module + " " + place->problem;
    }
    devices.insert(param.device());
    params.push_back(param);
    names.push_back(place->name);
  }

  const SampleLoss loss{model, forward, loss_fn};
  KeptRandomState random_state(devices);
  const auto refuse_random_numbers = [&] {
    TORCH_CHECK_VALUE(!random_state.has_drawn(),
                      "forward or loss_fn draws random numbers, so the gradient of a sample is not "
                      "defined; call eval() on the model or set the dropout probabilities to 0");
  };
  std::vector<LayerCall> calls;
  if (reason.empty()) {
    const at::AutoGradMode enable_grad(true);
    OperatorCapture capture(params);
    KeptBuffers buffers(model);
    reason = capture_samples(capture, loss, inputs.detach(), targets, names, buffers, calls);
    buffers.restore();
    refuse_random_numbers();
    std::erase_if(calls, [](const LayerCall& call) { return !call.output_gradient.defined(); });
  }
  std::vector<at::Tensor> rows;
  if (!calls.empty() && reason.empty()) {
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    rows = gradients::detail::Jacobian(params, calls).rows();
  } else {
    rows = zero_rows(params, inputs.size(0));
  }
  if (!reason.empty()) {
    TORCH_WARN_ONCE(
        "per_sample_gradients takes the samples one by one, which is slow for a batch: ", reason);
    const at::AutoGradMode enable_grad(true);
    set_rows_one_by_one(rows, loss, params, inputs.detach(), targets);
    refuse_random_numbers();
  }
  torch::OrderedDict<std::string, at::Tensor> result;
  for (const auto i : c10::irange(params.size())) {
    result.insert(names[i], rows[i].to(params[i].scalar_type()));
  }
  random_state.restore();
  return result;
}

}  // namespace torchium
