#include "gradients/capture/capture_state.h"

#include "gradients/capture/call_gradients.h"
#include "gradients/capture/mixed_samples.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace torchium::gradients::detail {
namespace {

namespace autograd = torch::autograd;

// Whether the input was changed in place after the layer had used it.
bool has_changed(const PendingCall& call) {
  const at::Tensor& input = call.layer.input;
  return !input.is_inference() && input._version() != call.input_version;
}

at::Tensor without_history(const at::Tensor& tensor) {
  return tensor.requires_grad() ? tensor.detach() : tensor;
}

}  // namespace

OperatorCapture::State::State(const std::vector<at::Tensor>& tensors, Receiver receiver,
                              bool takes_transposed)
    : receiver(std::move(receiver)), takes_transposed(takes_transposed) {
  for (const at::Tensor& param : tensors) {
    positions.emplace(param.unsafeGetTensorImpl(), static_cast<int64_t>(params.size()));
    params.emplace_back(param.getIntrusivePtr());
  }
}

int64_t OperatorCapture::State::position(const at::Tensor& param) const {
  const auto found = positions.find(param.unsafeGetTensorImpl());
  return found == positions.end() ? -1 : found->second;
}

int64_t OperatorCapture::State::trainable_position(const at::Tensor& param) const {
  return param.defined() && param.requires_grad() ? position(param) : -1;
}

bool OperatorCapture::State::is_accumulated(int64_t position) const {
  const auto impl = position < 0 ? nullptr : params[position].lock();
  return impl != nullptr &&
         accumulates(autograd::impl::try_get_grad_accumulator(at::Tensor(impl)).get());
}

int64_t OperatorCapture::State::pass_of(int64_t task) {
  const auto count = static_cast<int64_t>(passes.size());
  const auto [found, is_new] = passes.try_emplace(task, count);
  const int64_t pass = found->second;
  if (is_new && task == autograd::get_current_graph_task_id()) {
    autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task, pass] {
      if (const auto state = weak.lock()) {
        const std::lock_guard lock(state->mutex);
        const auto known = state->passes.find(task);
        if (known != state->passes.end() && known->second == pass) {  // not forgotten meanwhile
          state->end_pass(pass);
        }
      }
    });
  }
  return pass;
}

void OperatorCapture::State::arrive(int64_t position, int64_t pass, bool may_be_zeroed,
                                    std::vector<int64_t>& gone) {
  const auto impl = position < 0 ? nullptr : params[position].lock();
  if (impl == nullptr) {
    return;
  }
  auto& earlier = passes_of_param[position];
  const at::Tensor gradient = at::Tensor(impl).grad();
  // Once in a pass: a later call finds what earlier ones have brought.
  if (earlier.count(pass) == 0 &&
      (!gradient.defined() || (may_be_zeroed && was_zeroed(gradient, position)))) {
    std::erase_if(earlier, [&](int64_t other) {
      const bool is_gone = other != pass && ended_passes.count(other) != 0;
      if (is_gone) {
        gone.push_back(other);
      }
      return is_gone;
    });
  }
  earlier.insert(pass);
}

void OperatorCapture::State::end_pass(int64_t pass) {
  ended_passes.insert(pass);
  for (const auto& [position, reached] : passes_of_param) {
    const auto impl = reached.count(pass) == 0 ? nullptr : params[position].lock();
    if (impl != nullptr) {
      note_gradient(at::Tensor(impl).grad(), position);
    }
  }
}

void OperatorCapture::State::note_gradient(const at::Tensor& gradient, int64_t position) {
  if (gradient.defined() && !gradient.is_inference()) {
    c10::weak_intrusive_ptr<at::TensorImpl> tensor(gradient.getIntrusivePtr());
    seen_gradients.insert_or_assign(position, SeenGradient{std::move(tensor), gradient._version()});
  }
}

bool OperatorCapture::State::was_zeroed(const at::Tensor& gradient, int64_t position) {
  const auto seen = seen_gradients.find(position);
  if (seen == seen_gradients.end() || gradient.is_inference() ||
      (seen->second.tensor._unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
       seen->second.version == gradient._version())) {
    return false;
  }
  note_gradient(gradient, position);
  return !gradient.any().item<bool>();
}

void OperatorCapture::State::look_for_mixed_samples(int64_t pass) {
  const bool is_new = tasks_seen_for_mixing.insert(autograd::get_current_graph_task_id()).second;
  if (is_new && backward_pass_mixes_samples()) {
    mixing_passes.insert(pass);
  }
}

void OperatorCapture::State::receive(PendingCall& call, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const std::lock_guard lock(mutex);
  LayerCall layer = call.layer;
  // torch::autograd::grad() passes here too.
  layer.weight = is_accumulated(layer.weight) ? layer.weight : -1;
  layer.bias = is_accumulated(layer.bias) ? layer.bias : -1;
  if (!autograd::get_current_graph_task_keep_graph()) {
    call.layer.input = at::Tensor();  // the graph may outlive its last call
  }
  if (!gradient.defined() || !layer.input.defined() || (layer.weight < 0 && layer.bias < 0)) {
    return;
  }
  uncaptured.search(call.edges.get());
  layer.output_gradient = without_history(gradient).reshape(call.output_sizes);
  const int64_t task =
      call.outer_task >= 0 ? call.outer_task : autograd::get_current_graph_task_id();
  layer.micro_batch = pass_of(task);
  std::vector<int64_t> gone;
  arrive(layer.weight, layer.micro_batch, /*may_be_zeroed=*/true, gone);
  // The weight decides for the bias, whose gradient may have arrived before the call.
  arrive(layer.bias, layer.micro_batch, /*may_be_zeroed=*/layer.weight < 0, gone);
  look_for_mixed_samples(layer.micro_batch);
  receiver(std::move(layer), gone);
}

void OperatorCapture::forget() {
  const std::lock_guard lock(state_->mutex);
  state_->passes.clear();
  state_->ended_passes.clear();
  state_->passes_of_param.clear();
  state_->seen_gradients.clear();
  state_->uncaptured.forget();
  state_->mixing_passes.clear();
  state_->tasks_seen_for_mixing.clear();
  state_->processes = 1;
}

void OperatorCapture::raise_error() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(state_->mutex);
    error = std::exchange(state_->error, nullptr);
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

int64_t OperatorCapture::processes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->processes;
}

bool OperatorCapture::mixes_samples(int64_t pass) const {
  const std::lock_guard lock(state_->mutex);
  return state_->mixing_passes.count(pass) != 0;
}

bool OperatorCapture::is_used_otherwise(const at::Tensor& param) const {
  const std::lock_guard lock(state_->mutex);
  return state_->uncaptured.has_found(param);
}

int64_t OperatorCapture::parameter_used_otherwise(const at::Tensor& loss) const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->uncaptured.find(loss);
  for (const auto i : c10::irange(state_->params.size())) {
    if (found.count(state_->params[i]._unsafe_get_target()) != 0) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

bool OperatorCapture::has_overwritten_input() const {
  const std::lock_guard lock(state_->mutex);
  return std::any_of(state_->calls.begin(), state_->calls.end(),
                     [](const auto& call) { return has_changed(*call); });
}

std::vector<DifferentiableCall> OperatorCapture::calls_of(const at::Tensor& outputs) const {
  const std::lock_guard lock(state_->mutex);
  std::vector<DifferentiableCall> calls;
  for (const auto& [edge, captured] : state_->uncaptured.calls_of(outputs)) {
    const auto call = captured->pending.lock();
    if (call == nullptr) {
      continue;
    }
    TORCH_CHECK(call->layer.input.defined(),
                "the graph of outputs was freed by a backward pass; call update_curvature() before "
                "it, or retain the graph");
    TORCH_CHECK(!has_changed(*call), "the input ", call->layer.input.sizes(), " of a ",
                name_of(call->layer.kind),
                " layer was changed in place after the layer had used it; change a copy");
    calls.push_back({call->layer, edge, call->output_sizes});
  }
  return calls;
}

std::vector<LayerCall> OperatorCapture::differentiate(const at::Tensor& losses,
                                                      const at::Tensor& factors, bool keep) {
  const std::lock_guard lock(state_->mutex);
  const auto pending = state_->calls;
  const auto outputs = state_->outputs;
  if (!keep) {
    state_->calls.clear();
    state_->outputs.clear();
  }
  std::vector<LayerCall> calls;
  for (const auto& call : pending) {
    calls.push_back(call->layer);
  }
  if (!losses.defined() || !losses.requires_grad() || calls.empty()) {
    return calls;
  }
  const auto gradients = gradients_at(
      outputs, losses, factors.defined() ? factors : at::ones_like(losses), /*keep_graph=*/keep);
  for (size_t i = 0; i < pending.size(); ++i) {
    if (gradients[i].defined()) {
      calls[i].output_gradient = gradients[i].reshape(pending[i]->output_sizes);
    }
  }
  return calls;
}

}  // namespace torchium::gradients::detail
