#include "gradients/capture/operator_capture.h"

#include "gradients/capture/capture_state.h"
#include "gradients/capture/collectives.h"
#include "gradients/capture/graph_node.h"
#include "gradients/capture/operator_calls.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <shared_mutex>
#include <utility>

#ifndef NDEBUG
#error \
    "at::RecordFunction differs without NDEBUG, and libtorch is built with it; see CMakeLists.txt"
#endif

namespace torchium::gradients::detail {
namespace {

namespace autograd = torch::autograd;

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
// The node that computed the last product on this thread, and its calls: an in-place addition of a
// bias belongs to them.
thread_local struct {
  WeakNode node;
  std::vector<std::weak_ptr<PendingCall>> calls;
} last_product;

// Keeps what start() has read for end().
struct CallContext : public at::ObserverContext {
  explicit CallContext(bool hides_calls) : hides_calls(hides_calls) {
    hiding_operators += hides_calls ? 1 : 0;
  }
  ~CallContext() override { hiding_operators -= hides_calls ? 1 : 0; }

  const bool hides_calls;
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

// The call of the last product that `target` is the result of, in the same capture.
std::shared_ptr<PendingCall> product_call(const at::Tensor& target,
                                          const OperatorCapture::State* capture) {
  const auto node = last_product.node.lock();
  if (node == nullptr || node != target.grad_fn()) {
    return nullptr;
  }
  for (const auto& weak : last_product.calls) {
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
    const int64_t bias = capture->trainable_position(call.bias);
    if (call.is_in_place_addition && bias >= 0) {
      if (auto found = product_call(call.layer.input, capture.get())) {
        context.completed.emplace_back(std::move(found), call.bias);
        return;
      }
    }
    const at::Tensor& input = call.layer.input;
    const bool is_transposed = has_transposed_weight(call.layer);
    // A product of two parameters has no samples.
    const bool takes_weight =
        !is_transposed || (capture->takes_transposed && capture->trainable_position(input) < 0);
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
    pending->layer.input = (is_transposed && takes_weight ? with_samples(input) : input).detach();
    pending->edges = std::make_shared<CallEdges>();
    pending->edges->pending = pending;
    pending->edges->weight = weight < 0 ? nullptr : call.weight.unsafeGetTensorImpl();
    pending->edges->bias = bias < 0 ? nullptr : call.bias.unsafeGetTensorImpl();
    pending->edges->leaf_input = input.is_leaf() ? input.unsafeGetTensorImpl() : nullptr;
    pending->edges->input_node = input.grad_fn();
    pending->input_version = input.is_inference() ? 0 : input._version();
    pending->outer_task = autograd::get_current_graph_task_id();
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
  if (hiding_operators > 0 || !at::GradMode::is_enabled()) {
    return nullptr;
  }
  const LayerOperator* layer_operator = find_layer_operator(function.name());
  if (layer_operator == nullptr) {
    return nullptr;
  }
  auto context = std::make_unique<CallContext>(layer_operator->hides_calls);
  keep_error(context->error, [&] {
    if (const auto call = layer_operator->read(function.inputs())) {
      note_call(*call, *context);
    }
  });
  return context;
}

// The tensor whose hooks receive the gradient by `output` even if it is changed in place: for a
// view (of a product of more than two dimensions, for example) autograd then leaves out its own
// node.
at::Tensor tensor_to_hook(const at::Tensor& output) {
  if (!output.is_view()) {
    return output;
  }
  const at::Tensor base(output._base());
  return base.numel() == output.numel() && base.requires_grad() ? base : output;
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

  std::shared_ptr<PendingCall> call;
  size_t output;  // of the node
};

void note_output(const at::Tensor& output, CallContext& context) {
  const auto edge = autograd::impl::gradient_edge(tensor_to_hook(output));
  last_product.node = output.grad_fn();
  last_product.calls.assign(context.calls.begin(), context.calls.end());
  for (auto& call : context.calls) {
    const auto capture = call->capture.lock();
    if (capture == nullptr) {
      continue;
    }
    call->output_sizes = output.sizes().vec();
    if (has_transposed_weight(call->layer)) {  // dimensions as those of the input
      const auto leading = call->layer.input.sizes();
      call->output_sizes.assign(leading.begin(), leading.end() - 1);
      call->output_sizes.push_back(output.size(-1));
    }
    {
      const std::lock_guard lock(capture->mutex);
      capture->uncaptured.add(edge, call->edges);
    }
    if (capture->receiver) {
      edge.function->add_pre_hook(std::make_unique<ReceivingHook>(call, edge.input_nr));
    } else {
      const std::lock_guard lock(capture->mutex);
      capture->calls.push_back(call);
      capture->outputs.push_back(edge);
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
      note_output(output, context);
    }
  });
  if (context.error != nullptr) {
    report_error(context.error);
  }
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

OperatorCapture::OperatorCapture(std::vector<at::Tensor> params, Receiver receiver,
                                 bool takes_transposed)
    : state_(std::make_shared<State>(params, std::move(receiver), takes_transposed)) {}

OperatorCapture::~OperatorCapture() { set_enabled(false); }

bool OperatorCapture::watches(const std::vector<at::Tensor>& params) const {
  bool result = params.size() == state_->params.size();
  for (size_t i = 0; result && i < params.size(); ++i) {
    result = state_->position(params[i]) == static_cast<int64_t>(i);
  }
  return result;
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

}  // namespace torchium::gradients::detail
