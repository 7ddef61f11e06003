#include "gradients/capture/operator_capture.h"

#include "gradients/capture/collectives.h"
#include "gradients/capture/graph_node.h"
#include "gradients/capture/operator_calls.h"
#include "gradients/capture/operator_state.h"
#include "gradients/capture/registered_layer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <shared_mutex>
#include <string>
#include <utility>

#ifndef NDEBUG
#error \
    "at::RecordFunction differs without NDEBUG, and libtorch is built with it; see CMakeLists.txt"
#endif

namespace torchium::gradients::detail {
namespace {

namespace autograd = torch::autograd;
namespace nn = torch::nn;

// All enabled captures, and the callback, which exists as long as there are some.
class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry();  // never destroyed: threads may outlive main()
    return *registry;
  }
  void add(const std::shared_ptr<OperatorCapture::State>& capture);
  void remove(const OperatorCapture::State* capture);
  // Calls visit(capture) for each.
  template <typename Visitor>
  void for_each(Visitor&& visit) {
    const std::shared_lock lock(mutex_);
    for (const auto& capture : captures_) {
      visit(capture);
    }
  }

 private:
  std::shared_mutex mutex_;
  std::vector<std::shared_ptr<OperatorCapture::State>> captures_;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
};

// Of this thread: how many operators that hide calls are running.
thread_local int hiding_operators = 0;
// The node that computed a product, and its calls.
struct LastProduct {
  WeakNode node;
  std::vector<std::weak_ptr<PendingCall>> calls;
};
// Of this thread, if no operator has run since: an in-place addition of a bias then belongs to its
// calls. An operator between them may use the product without the bias.
thread_local LastProduct last_product;

// Of this thread: captures that take the layer call in progress as a whole.
thread_local std::vector<const OperatorCapture::State*> whole_calls;

bool is_in_whole_call(const OperatorCapture::State* capture) {
  return std::find(whole_calls.begin(), whole_calls.end(), capture) != whole_calls.end();
}

// Keeps what start() has read for end().
struct CallContext : public at::ObserverContext {
  CallContext(bool hides_calls, LastProduct before)
      : hides_calls(hides_calls), before(std::move(before)) {
    hiding_operators += hides_calls ? 1 : 0;
  }
  ~CallContext() override { hiding_operators -= hides_calls ? 1 : 0; }

  const bool hides_calls;
  const LastProduct before;  // that of the operator before this one
  std::exception_ptr error;
  PendingCalls calls;
  // Calls that an addition completes, with the bias.
  std::vector<std::pair<std::shared_ptr<PendingCall>, at::Tensor>> completed;
};

// Runs a part of a callback, where exceptions would be lost, and keeps the first one.
template <typename Action>
void keep_error(std::exception_ptr& error, Action&& action) noexcept {
  try {
    action();
  } catch (...) {
    if (error == nullptr) {
      error = std::current_exception();
    }
  }
}

// Every capture raises it later.
void report_error(const std::exception_ptr& error) {
  Registry::instance().for_each([&](const auto& capture) {
    const std::lock_guard lock(capture->mutex);
    if (capture->error == nullptr) {
      capture->error = error;
    }
  });
}

// The call, in the same capture, of the product that `target` is.
std::shared_ptr<PendingCall> product_call(const at::Tensor& target, const LastProduct& product,
                                          const OperatorCapture::State* capture) {
  const auto node = product.node.lock();
  if (node == nullptr || node != target.grad_fn()) {
    return nullptr;
  }
  for (const auto& weak : product.calls) {
    auto call = weak.lock();
    if (call != nullptr && call->layer.kind == LayerKind::kLinear && call->layer.bias < 0 &&
        call->capture.lock().get() == capture) {
      return call;
    }
  }
  return nullptr;
}

// What [samples * positions, in] is a view of: dimension 0 is to be the sample.
at::Tensor with_samples(const at::Tensor& input) {
  if (input.dim() != 2 || !input.is_view() || !input.is_contiguous()) {
    return input;
  }
  const at::Tensor base(input._base());
  const bool is_whole = base.dim() > 2 && base.is_contiguous() && base.numel() == input.numel() &&
                        base.size(0) > 0 && input.size(0) % base.size(0) == 0;
  return is_whole ? input.view({base.size(0), input.size(0) / base.size(0), input.size(1)}) : input;
}

void note_call(const OperatorCall& call, CallContext& context) {
  Registry::instance().for_each([&](const std::shared_ptr<OperatorCapture::State>& capture) {
    if (call.layer.kind == LayerKind::kBatchNorm && !capture->takes_batch_norm) {
      return;
    }
    if (is_in_whole_call(capture.get())) {
      return;
    }
    const int64_t bias = capture->trainable_position(call.bias);
    if (call.is_in_place_addition && bias >= 0) {
      if (auto found = product_call(call.layer.input, context.before, capture.get())) {
        context.completed.emplace_back(std::move(found), call.bias);
        return;
      }
    }
    const at::Tensor& input = call.input;
    const bool is_transposed = has_transposed_weight(call.layer);
    // A product of two parameters has no samples.
    const bool takes_weight = !is_transposed || capture->trainable_position(input) < 0;
    const int64_t weight = takes_weight ? capture->trainable_position(call.weight) : -1;
    if (weight < 0 && bias < 0) {
      return;
    }
    auto pending = std::make_shared<PendingCall>();
    pending->capture = capture;
    pending->layer = call.layer;
    pending->layer.weight = weight;
    pending->layer.bias = bias;
    pending->layer.settings[kTransposedWeight] *= takes_weight ? 1 : 0;
    const at::Tensor& read = call.layer.input;
    pending->layer.input = (is_transposed && takes_weight ? with_samples(read) : read).detach();
    pending->edges = edges_of(pending, input, weight < 0 ? at::Tensor() : call.weight,
                              bias < 0 ? at::Tensor() : call.bias);
    pending->input_version = read.is_inference() ? 0 : read._version();
    pending->outer = pass_of_forward();
    if (read.dim() == 3 && capture->inner_samples.count(weight < 0 ? bias : weight) != 0) {
      pending->inner_samples = read.size(1);
    }
    context.calls.push_back(std::move(pending));
  });
}

void note_exchange(const at::RecordFunction& function) {
  const int64_t processes = processes_of(function);
  if (processes > 1) {
    Registry::instance().for_each([&](const auto& capture) {
      const std::lock_guard lock(capture->mutex);
      capture->processes = std::max(capture->processes, processes);
    });
  }
}

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
  note_exchange(function);
  if (hiding_operators > 0) {
    return nullptr;
  }
  LastProduct before = std::exchange(last_product, {});
  const LayerOperator* layer_operator = find_layer_operator(function.name());
  if (layer_operator == nullptr) {
    return nullptr;
  }
  if (!at::GradMode::is_enabled()) {
    pass_of_forward();  // perhaps a checkpoint, with others in it
    return nullptr;
  }
  auto context = std::make_unique<CallContext>(layer_operator->hides_calls, std::move(before));
  keep_error(context->error, [&] {
    if (const auto call = layer_operator->read(function.inputs())) {
      note_call(*call, *context);
    }
  });
  return context;
}

// Those of the output with the dimensions of the captured input.
std::vector<int64_t> sizes_of_output(const at::Tensor& output, const LayerCall& layer) {
  std::vector<int64_t> sizes = output.sizes().vec();
  if (has_transposed_weight(layer)) {
    sizes = layer.input.sizes().vec();
    sizes.back() = output.size(-1);
  } else if (is_convolution(layer) && layer.input.dim() > output.dim()) {  // conv1d: a height of 1
    sizes.insert(sizes.end() - 1, 1);
  }
  return sizes;
}

void note_output(const at::Tensor& output, const PendingCalls& calls) {
  for (const auto& call : calls) {
    const auto capture = std::static_pointer_cast<OperatorCapture::State>(call->capture.lock());
    if (capture == nullptr) {
      continue;
    }
    call->output_sizes = sizes_of_output(output, call->layer);
    capture->add(call, output, /*is_received=*/!capture->is_differentiated);
    if (capture->is_differentiated) {
      const std::lock_guard lock(capture->mutex);
      capture->calls.push_back(call);
      capture->outputs.push_back(autograd::impl::gradient_edge(tensor_to_hook(output)));
    }
  }
}

// The sum belongs to the call; in a view, its base too has a new node.
void note_addition(const at::Tensor& output, const at::Tensor& bias, PendingCall& call) {
  if (const auto capture = call.capture.lock()) {
    const std::lock_guard lock(capture->mutex);
    call.layer.bias = capture->position(bias);
    call.edges->bias = bias.unsafeGetTensorImpl();
    capture->uncaptured.add_node(output.grad_fn(), call.edges);
    capture->uncaptured.add_node(autograd::impl::gradient_edge(tensor_to_hook(output)).function,
                                 call.edges);
  }
}

void end(const at::RecordFunction& function, at::ObserverContext* observed) {
  if (observed == nullptr) {
    return;
  }
  auto& context = static_cast<CallContext&>(*observed);
  const auto& outputs = function.outputs();
  if (outputs.empty() || !outputs.front().isTensor()) {  // the operator has thrown
    return;
  }
  keep_error(context.error, [&] {
    const at::Tensor& output = outputs.front().toTensor();
    for (auto& [call, bias] : context.completed) {
      note_addition(output, bias, *call);
    }
    if (!context.calls.empty() && output.requires_grad()) {
      last_product.node = output.grad_fn();
      last_product.calls.assign(context.calls.begin(), context.calls.end());
      note_output(output, context.calls);
    }
  });
  if (context.error != nullptr) {
    report_error(context.error);
  }
}

using NamedParam = std::pair<std::string, at::Tensor>;

// The call of a layer with a formula, for each capture that takes it as a whole; of more than two
// parameters, several calls.
PendingCalls whole_calls_of(const nn::Module& layer, const std::shared_ptr<const Formula>& formula,
                            const at::Tensor& input) {
  PendingCalls calls;
  Registry::instance().for_each([&](const std::shared_ptr<OperatorCapture::State>& capture) {
    if (!capture->takes_registered_layers || is_in_whole_call(capture.get())) {
      return;
    }
    std::vector<NamedParam> own;
    for (const auto& param : layer.named_parameters(/*recurse=*/false)) {
      if (capture->trainable_position(param.value()) >= 0) {
        own.emplace_back(param.key(), param.value());
      }
    }
    std::shared_ptr<CallEdges> edges;
    for (size_t k = 0; k < own.size(); k += 2) {  // as many as a call has
      const auto [weight_name, weight] = own[k];
      const auto [bias_name, bias] = k + 1 < own.size() ? own[k + 1] : NamedParam();
      auto pending = std::make_shared<PendingCall>();
      edges = edges != nullptr ? edges : edges_of(pending, input, weight, bias);
      pending->capture = capture;
      pending->layer.kind = LayerKind::kRegistered;
      pending->layer.weight = capture->trainable_position(weight);
      pending->layer.bias = capture->trainable_position(bias);
      pending->layer.input = input.detach();
      pending->layer.registered = std::make_shared<RegisteredLayer>(
          RegisteredLayer{formula, layer.weak_from_this().lock(), &layer, weight_name, bias_name});
      pending->edges = edges;
      pending->input_version = input.is_inference() ? 0 : input._version();
      pending->outer = pass_of_forward();
      calls.push_back(std::move(pending));
    }
    for (size_t k = 2; k < own.size(); ++k) {
      edges->others.push_back(own[k].second.unsafeGetTensorImpl());
    }
  });
  return calls;
}

void Registry::add(const std::shared_ptr<OperatorCapture::State>& capture) {
  const std::lock_guard lock(mutex_);
  captures_.push_back(capture);
  if (callback_ == at::INVALID_CALLBACK_HANDLE) {
    callback_ = at::addGlobalCallback(at::RecordFunctionCallback(&start, &end)
                                          .needsInputs(true)
                                          .needsOutputs(true)
                                          .scopes({at::RecordScope::FUNCTION}));
  }
}

void Registry::remove(const OperatorCapture::State* capture) {
  const std::lock_guard lock(mutex_);
  std::erase_if(captures_, [&](const auto& other) { return other.get() == capture; });
  if (captures_.empty() && callback_ != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(callback_);
    callback_ = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace

OperatorCapture::OperatorCapture(const std::vector<at::Tensor>& params, const Receiver& receiver,
                                 bool takes_batch_norm, bool joins_passes)
    : state_(std::make_shared<State>(params, receiver, takes_batch_norm)) {
  state_->joins_passes = joins_passes;
}

void OperatorCapture::take_registered_layers() { state_->takes_registered_layers = true; }

OperatorCapture::~OperatorCapture() { set_enabled(false); }

bool OperatorCapture::watches(const std::vector<at::Tensor>& params) const {
  bool result = params.size() == state_->size();
  for (size_t i = 0; result && i < params.size(); ++i) {
    result = state_->position(params[i]) == static_cast<int64_t>(i);
  }
  return result;
}

void OperatorCapture::set_inner_samples(const std::vector<int64_t>& params) {
  state_->inner_samples = {params.begin(), params.end()};
}

void OperatorCapture::set_enabled(bool enabled) {
  if (enabled == is_enabled_) {
    return;
  }
  is_enabled_ = enabled;
  if (enabled) {
    Registry::instance().add(state_);
  } else {
    Registry::instance().remove(state_.get());
  }
}

// ---- layers with a formula

at::Tensor call_layer(const std::type_info& type, const nn::Module& layer, const at::Tensor& input,
                      const std::function<at::Tensor()>& forward) {
  const bool may_count = at::GradMode::is_enabled() && input.defined() && input.dim() > 0;
  const auto formula = may_count ? formula_of(type) : nullptr;
  const PendingCalls calls =
      formula == nullptr ? PendingCalls() : whole_calls_of(layer, formula, input);
  if (calls.empty()) {
    return forward();
  }
  const size_t before = whole_calls.size();
  for (const auto& call : calls) {
    const auto capture = call->capture.lock();
    whole_calls.push_back(static_cast<const OperatorCapture::State*>(capture.get()));
  }
  const auto end = c10::make_scope_exit([&] { whole_calls.resize(before); });
  at::Tensor output = forward();
  // The input itself, perhaps changed in place, has no node of this call.
  if (output.defined() && output.requires_grad() && output.grad_fn() != input.grad_fn()) {
    last_product = {};
    note_output(output, calls);
  }
  return output;
}

}  // namespace torchium::gradients::detail
