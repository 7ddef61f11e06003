#include "gradients/capture/capture_state.h"

#include "gradients/capture/mixed_samples.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

namespace torchium::gradients::detail {
namespace {

namespace autograd = torch::autograd;

at::Tensor without_history(const at::Tensor& tensor) {
  return tensor.requires_grad() ? tensor.detach() : tensor;
}

// In messages.
std::string text_of(const PendingCall& call) {
  return call.module ? call.module->text : c10::str("a ", name_of(call.layer.kind), " layer");
}

[[noreturn]] void refuse_changed_input(const PendingCall& call) {
  TORCH_CHECK(false, "the input of ", text_of(call),
              " was changed in place after the layer had used it; its second-order information is "
              "lost. Change a copy, or use an operation that is not in place");
}

at::Tensor unpacked(const PendingCall& call, const autograd::SavedVariable& saved) {
  try {
    return without_history(saved.unpack());
  } catch (const c10::Error& error) {
    const std::string_view message = error.what_without_backtrace();
    if (message.find("modified by an inplace operation") != message.npos) {
      refuse_changed_input(call);
    }
    throw;
  }
}

// Saved tensors are checked when they are unpacked.
void check_observed_input(const PendingCall& call, const at::Tensor& input) {
  const bool is_observed = call.module == nullptr && call.layer.weight >= 0;
  if (is_observed && !input.is_inference() && input._version() != call.input_version) {
    refuse_changed_input(call);
  }
}

// Hands over the gradient that a node gets, which hooks of the output tensor may have changed.
struct ReceivingHook : public autograd::FunctionPreHook {
  ReceivingHook(std::shared_ptr<PendingCall> call, size_t output)
      : call(std::move(call)), output(output) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    const auto capture = call->capture.lock();
    if (capture != nullptr && gradients[output].defined()) {
      capture->receive(*call, gradients[output]);
    }
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    refuse_compiled_autograd();
  }

  std::shared_ptr<PendingCall> call;
  size_t output;  // of the node
};

// Whether view and base have their elements in one order, so that reshape() takes one to the other.
bool has_order_of(const at::Tensor& view, const at::Tensor& base) {
  const auto dims = [](const at::Tensor& tensor) {
    std::vector<std::pair<int64_t, int64_t>> result;  // sizes and strides
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.size(d) != 1) {
        result.emplace_back(tensor.size(d), tensor.stride(d));
      }
    }
    return result;
  };
  return (view.is_contiguous() && base.is_contiguous()) || dims(view) == dims(base);
}

}  // namespace

at::Tensor ModuleLayer::in_core(const at::Tensor& tensor) const {
  return adds_height ? tensor.unsqueeze(-2) : moves_channels ? tensor.movedim(1, -1) : tensor;
}

at::Tensor core_input(const PendingCall& call, const at::Tensor& input) {
  const ModuleLayer* layer = call.module.get();
  if (layer == nullptr) {
    return input;
  }
  const at::Tensor padded =
      layer->padding.empty() ? input : at::pad(input, layer->padding, layer->padding_mode);
  return layer->in_core(padded);
}

at::Tensor core_gradient(const PendingCall& call, const at::Tensor& gradient) {
  return call.module == nullptr ? gradient : call.module->in_core(gradient);
}

at::Tensor with_samples_first(const PendingCall& call, const at::Tensor& tensor) {
  if (call.inner_samples == 0) {
    return tensor;
  }
  return tensor.reshape({-1, call.inner_samples, tensor.size(-1)}).transpose(0, 1);
}

std::shared_ptr<CallEdges> edges_of(const std::shared_ptr<PendingCall>& call,
                                    const at::Tensor& input, const at::Tensor& weight,
                                    const at::Tensor& bias) {
  const auto impl = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.unsafeGetTensorImpl() : nullptr;
  };
  auto edges = std::make_shared<CallEdges>();
  edges->pending = call;
  edges->weight = impl(weight);
  edges->bias = impl(bias);
  edges->leaf_input = input.is_leaf() ? impl(input) : nullptr;
  edges->input_node = input.grad_fn();
  return edges;
}

void refuse_compiled_autograd() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "compiled autograd does not run the hooks that see the gradients of layers; set "
      "torch._dynamo.config.compiled_autograd = False for K-FAC, natural gradient and "
      "per-sample gradients");
}

at::Tensor tensor_to_hook(const at::Tensor& output) {
  if (!output.is_view()) {
    return output;
  }
  const at::Tensor base(output._base());
  return base.numel() == output.numel() && base.requires_grad() && has_order_of(output, base)
             ? base
             : output;
}

// ---- parameters

CaptureState::CaptureState(const std::vector<at::Tensor>& params, Receiver receiver,
                           bool finds_mixing)
    : receiver(std::move(receiver)), finds_mixing_(finds_mixing) {
  watch(params);
}

void CaptureState::watch(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    const auto position = static_cast<int64_t>(params_.size());
    if (positions_.emplace(param.unsafeGetTensorImpl(), position).second) {
      params_.emplace_back(param.getIntrusivePtr());
    }
  }
}

int64_t CaptureState::position(const at::Tensor& param) const {
  const auto found =
      param.defined() ? positions_.find(param.unsafeGetTensorImpl()) : positions_.end();
  return found == positions_.end() ? -1 : found->second;
}

int64_t CaptureState::trainable_position(const at::Tensor& param) const {
  return param.defined() && param.requires_grad() ? position(param) : -1;
}

at::Tensor CaptureState::param(int64_t position) const {
  return position < 0 ? at::Tensor() : at::Tensor(params_[position].lock());
}

bool CaptureState::is_accumulated(int64_t position) const {
  const at::Tensor param = this->param(position);
  return param.defined() && accumulates(autograd::impl::try_get_grad_accumulator(param).get());
}

// ---- backward passes

int64_t CaptureState::pass_of(const BackwardPass& outer) {
  const auto count = static_cast<int64_t>(running_.size());
  const auto [found, is_new] = passes_.try_emplace(outer.task, count);
  const int64_t pass = found->second;
  if (is_new) {
    const bool is_current = outer.task == autograd::get_current_graph_task_id();
    running_.push_back(is_current ? watch_task() : outer.running);
    autograd::Engine::get_default_engine().queue_callback(
        [weak = weak_from_this(), task = outer.task, pass] {
          if (const auto state = weak.lock()) {
            const std::lock_guard lock(state->mutex);
            const auto known = state->passes_.find(task);
            if (known != state->passes_.end() && known->second == pass) {  // not forgotten
              state->end_pass(pass);
            }
          }
        });
  }
  return pass;
}

int64_t CaptureState::current_pass(const BackwardPass& outer) {
  return pass_of(outer.task >= 0 ? outer : BackwardPass{autograd::get_current_graph_task_id(), {}});
}

void CaptureState::arrive(int64_t position, int64_t pass, bool may_be_zeroed,
                          std::vector<int64_t>& gone) {
  const at::Tensor param = this->param(position);
  if (!param.defined()) {
    return;
  }
  auto& earlier = passes_of_param_[position];
  // Once in a pass: a later call finds what earlier ones have brought.
  if (!earlier.insert(pass).second) {
    return;
  }
  std::vector<int64_t> ended;
  std::copy_if(earlier.begin(), earlier.end(), std::back_inserter(ended),
               [&](int64_t other) { return other != pass && running_[other].expired(); });
  const at::Tensor gradient = param.grad();
  if (!ended.empty() &&
      (!gradient.defined() || (may_be_zeroed && was_zeroed(gradient, position)))) {
    for (const int64_t other : ended) {
      earlier.erase(other);
      gone.push_back(other);
    }
  }
}

void CaptureState::end_pass(int64_t pass) {
  for (const auto& [position, reached] : passes_of_param_) {
    const at::Tensor param = reached.count(pass) == 0 ? at::Tensor() : this->param(position);
    if (param.defined()) {
      note_gradient(param.grad(), position);
    }
  }
}

void CaptureState::note_gradient(const at::Tensor& gradient, int64_t position) {
  if (gradient.defined() && !gradient.is_inference()) {
    c10::weak_intrusive_ptr<at::TensorImpl> tensor(gradient.getIntrusivePtr());
    seen_gradients_.insert_or_assign(position,
                                     SeenGradient{std::move(tensor), gradient._version()});
  }
}

bool CaptureState::is_as_seen(const at::Tensor& gradient, int64_t position) const {
  const auto seen = seen_gradients_.find(position);  // none: the earlier passes have failed
  return gradient.is_inference() ||
         (seen != seen_gradients_.end() &&
          seen->second.tensor._unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
          seen->second.version == gradient._version());
}

bool CaptureState::was_zeroed(const at::Tensor& gradient, int64_t position) {
  if (is_as_seen(gradient, position)) {
    return false;
  }
  note_gradient(gradient, position);
  return !gradient.any().item<bool>();
}

void CaptureState::look_for_mixed_samples(int64_t pass) {
  const bool is_new = tasks_seen_for_mixing_.insert(autograd::get_current_graph_task_id()).second;
  if (is_new && backward_pass_mixes_samples()) {
    mixing_passes.insert(pass);
  }
}

void CaptureState::look_for_second_pass(PendingCall& call, const LayerCall& layer) {
  const auto passes = passes_of_param_.find(layer.weight >= 0 ? layer.weight : layer.bias);
  if (!has_warned_ && passes != passes_of_param_.end() && call.last_period == period_ &&
      call.last_pass >= 0 && call.last_pass != layer.micro_batch &&
      passes->second.count(call.last_pass) > 0) {
    has_warned_ = true;
    TORCH_WARN("a second backward pass has reached the same call of ", text_of(call),
               ", and the samples of both count as samples of their own; add the losses of one "
               "forward pass and call backward() once");
  }
  call.last_pass = layer.micro_batch;
  call.last_period = period_;
}

// Also where no gradient of the call's parameters is accumulated, as by backward(inputs=...): the
// parameters before it get theirs later in the pass.
void CaptureState::join_passes(PendingCall& call, int64_t pass) {
  const bool is_second =
      call.last_period == period_ && call.last_pass >= 0 && call.last_pass != pass;
  if (is_second && first_passes_.count(pass) == 0) {
    const int64_t earlier = first_pass(call.last_pass);
    first_passes_.emplace(pass, has_gradients(earlier) ? earlier : pass);
  }
  call.last_pass = pass;
  call.last_period = period_;
}

int64_t CaptureState::first_pass(int64_t pass) const {
  const auto found = first_passes_.find(pass);
  return found == first_passes_.end() ? pass : found->second;
}

bool CaptureState::mixes_samples(int64_t pass) const {
  return std::any_of(mixing_passes.begin(), mixing_passes.end(),
                     [&](int64_t other) { return other == pass || first_pass(other) == pass; });
}

bool CaptureState::has_gradients(int64_t pass) const {
  return std::any_of(passes_of_param_.begin(), passes_of_param_.end(), [&](const auto& entry) {
    const at::Tensor param =
        entry.second.count(pass) == 0 ? at::Tensor() : this->param(entry.first);
    const at::Tensor gradient = param.defined() ? param.grad() : at::Tensor();
    return gradient.defined() && (is_as_seen(gradient, entry.first) || gradient.any().item<bool>());
  });
}

void CaptureState::warn_of_gradients_without_calls() {
  const std::lock_guard lock(mutex);
  if (!passes_of_param_.empty()) {
    TORCH_WARN(
        "State is loaded between backward() and step(). The next step knows the layer calls of "
        "later backward passes only, but the gradients of the earlier ones are still there: call "
        "zero_grad() after loading, or load before the first backward()");
  }
}

void CaptureState::forget() {
  passes_.clear();
  running_.clear();
  passes_of_param_.clear();
  seen_gradients_.clear();
  uncaptured.forget();
  mixing_passes.clear();
  tasks_seen_for_mixing_.clear();
  first_passes_.clear();
  started_tasks_.clear();
  ++period_;
}

// ---- calls

void CaptureState::add(const std::shared_ptr<PendingCall>& call, const at::Tensor& output,
                       bool is_received) {
  const auto edge = autograd::impl::gradient_edge(tensor_to_hook(output));
  {
    const std::lock_guard lock(mutex);
    uncaptured.add(edge, call->edges);
  }
  if (is_received) {
    edge.function->add_pre_hook(std::make_unique<ReceivingHook>(call, edge.input_nr));
  }
}

void CaptureState::receive(PendingCall& call, const at::Tensor& gradient) {
  LayerCall layer;
  std::shared_ptr<const autograd::SavedVariable> saved;
  {
    const std::lock_guard lock(mutex);
    layer = call.layer;
    saved = call.saved_input;
    // torch::autograd::grad() passes here too.
    layer.weight = is_accumulated(layer.weight) ? layer.weight : -1;
    layer.bias = is_accumulated(layer.bias) ? layer.bias : -1;
    if (joins_passes) {
      join_passes(call, current_pass(call.outer));
    }
    if (!autograd::get_current_graph_task_keep_graph()) {  // the graph may outlive its last call
      call.layer.input.reset();
      call.saved_input.reset();
    }
  }
  if (gradient.numel() == 0 || (layer.weight < 0 && layer.bias < 0)) {
    return;
  }
  // Hooks of saved tensors may run the model once more: without the mutex, under autocast.
  const at::Tensor input = saved == nullptr ? layer.input : unpacked(call, *saved);
  if (!input.defined()) {
    return;
  }
  check_observed_input(call, input);
  start(call);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const std::lock_guard lock(mutex);
  layer.input = with_samples_first(call, input);
  layer.output_gradient =
      with_samples_first(call, without_history(gradient).reshape(call.output_sizes));
  layer.micro_batch = current_pass(call.outer);
  std::vector<int64_t> gone;
  arrive(layer.weight, layer.micro_batch, /*may_be_zeroed=*/true, gone);
  // The weight decides for the bias, whose gradient may have arrived before the call.
  arrive(layer.bias, layer.micro_batch, /*may_be_zeroed=*/layer.weight < 0, gone);
  if (joins_passes) {
    layer.first_pass = first_pass(layer.micro_batch);
  } else {
    look_for_second_pass(call, layer);
  }
  if (finds_mixing_) {
    look_for_mixed_samples(layer.micro_batch);
  }
  if (receiver) {
    receiver(call, std::move(layer), gone);
  }
}

void CaptureState::start(const PendingCall& call) {
  const std::lock_guard starting(start_mutex_);
  {
    const std::lock_guard lock(mutex);
    uncaptured.search(call.edges.get());
    if (!started_tasks_.insert(autograd::get_current_graph_task_id()).second) {
      return;
    }
  }
  if (on_start) {
    on_start();
  }
}

std::vector<DifferentiableCall> CaptureState::calls_of(const at::Tensor& outputs) {
  struct Found {
    torch::autograd::Edge edge;
    std::shared_ptr<PendingCall> call;
    LayerCall layer;
    std::shared_ptr<const autograd::SavedVariable> saved;
  };
  std::vector<Found> found;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [edge, captured] : uncaptured.calls_of(outputs)) {
      if (auto call = captured->pending.lock()) {
        found.push_back({edge, call, call->layer, call->saved_input});
      }
    }
  }
  std::vector<DifferentiableCall> calls;
  for (auto& [edge, call, layer, saved] : found) {
    TORCH_CHECK(saved != nullptr || layer.input.defined(),
                "the graph of outputs was freed by a backward pass; call update_curvature() before "
                "it, or retain the graph");
    const at::Tensor input = saved == nullptr ? layer.input : unpacked(*call, *saved);
    check_observed_input(*call, input);
    const at::NoGradGuard no_grad;
    layer.input = core_input(*call, with_samples_first(*call, input));
    calls.push_back({std::move(layer), edge, call});
  }
  return calls;
}

}  // namespace torchium::gradients::detail
