#include "gradients/operator_capture.h"

#include "gradients/operator_calls.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#ifndef NDEBUG
#error \
    "at::RecordFunction differs without NDEBUG, and libtorch is built with it; see CMakeLists.txt"
#endif

namespace torchium::gradients::detail {
namespace {

namespace autograd = torch::autograd;

// A use between its forward and its backward pass.
struct PendingUse {
  std::weak_ptr<OperatorCapture::State> capture;
  LayerUse layer;
  int64_t outer_task = -1;  // the backward pass that this forward pass is a part of
  std::vector<int64_t> output_sizes;
  std::shared_ptr<autograd::Node> input_node;  // without a receiver: of the input, if it has one
};
using PendingUses = std::vector<std::shared_ptr<PendingUse>>;

// All enabled captures, and the callback that is there as long as there are some.
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

}  // namespace

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
  autograd::edge_list outputs;  // of each
  // What an addition has made of the output of a use, with the output.
  std::vector<std::pair<std::shared_ptr<autograd::Node>, std::shared_ptr<autograd::Node>>>
      additions;
};

namespace {

// Of this thread: how many operators that hide calls are running.
thread_local int hiding_operators = 0;
// The node that computed the last product on this thread, and its uses: an addition in place of a
// bias belongs to them.
thread_local struct {
  std::weak_ptr<autograd::Node> node;
  std::vector<std::weak_ptr<PendingUse>> uses;
} last_product;

// Keeps what start() has read for end().
struct CallContext : public at::ObserverContext {
  explicit CallContext(bool hides_calls) : hides_calls(hides_calls) {
    hiding_operators += hides_calls ? 1 : 0;
  }
  ~CallContext() override { hiding_operators -= hides_calls ? 1 : 0; }

  const bool hides_calls;
  PendingUses uses;
  // Uses that an addition completes, with the position of the bias.
  std::vector<std::pair<std::shared_ptr<PendingUse>, int64_t>> completed;
};

// Exceptions of callbacks would be lost: every capture raises them later.
template <typename Action>
void keep_errors(Action&& action) noexcept {
  try {
    action();
  } catch (...) {
    const auto error = std::current_exception();
    Registry::instance().for_each([&](const auto& capture) {
      const std::lock_guard lock(capture->mutex);
      if (capture->error == nullptr) {
        capture->error = error;
      }
    });
  }
}

// The use of the last product that `target` is the result of, in the same capture.
std::shared_ptr<PendingUse> product_use(const at::Tensor& target,
                                        const OperatorCapture::State* capture) {
  const auto node = last_product.node.lock();
  if (node == nullptr || node != target.grad_fn()) {
    return nullptr;
  }
  for (const auto& weak : last_product.uses) {
    auto use = weak.lock();
    if (use != nullptr && use->layer.kind == LayerKind::kLinear && use->layer.bias < 0 &&
        use->capture.lock().get() == capture) {
      return use;
    }
  }
  return nullptr;
}

void note_call(const LayerCall& call, CallContext& context) {
  Registry::instance().for_each([&](const std::shared_ptr<OperatorCapture::State>& capture) {
    const int64_t bias = capture->trainable_position(call.bias);
    if (call.is_in_place_addition && bias >= 0) {
      if (auto use = product_use(call.use.input, capture.get())) {
        context.completed.emplace_back(std::move(use), bias);
        return;
      }
    }
    const int64_t weight = capture->trainable_position(call.weight);
    if (weight < 0 && bias < 0) {
      return;
    }
    auto use = std::make_shared<PendingUse>();
    use->capture = capture;
    use->layer = call.use;
    use->layer.weight = weight;
    use->layer.bias = bias;
    use->layer.input = call.use.input.detach();
    use->outer_task = autograd::get_current_graph_task_id();
    if (!capture->receiver) {
      use->input_node = call.use.input.grad_fn();
    }
    context.uses.push_back(std::move(use));
  });
}

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
  if (hiding_operators > 0 || !at::GradMode::is_enabled()) {
    return nullptr;
  }
  std::unique_ptr<CallContext> context;
  keep_errors([&] {
    const LayerOperator* layer_operator = find_layer_operator(function.name());
    if (layer_operator == nullptr) {
      return;
    }
    const auto call = layer_operator->read(function.inputs());
    if (call.has_value() || layer_operator->hides_calls) {
      context = std::make_unique<CallContext>(layer_operator->hides_calls);
    }
    if (call.has_value()) {
      note_call(*call, *context);
    }
  });
  return context;
}

// The tensor whose hooks see the gradient by `output` whatever happens to it in place: for a view
// (of a product of more than two dimensions, for example) autograd then leaves out its own node.
at::Tensor tensor_to_hook(const at::Tensor& output) {
  if (!output.is_view()) {
    return output;
  }
  const at::Tensor base(output._base());
  return base.numel() == output.numel() && base.requires_grad() ? base : output;
}

void note_output(const at::Tensor& output, CallContext& context) {
  const at::Tensor hooked = tensor_to_hook(output);
  const auto edge = autograd::impl::gradient_edge(hooked);
  last_product.node = output.grad_fn();
  last_product.uses.assign(context.uses.begin(), context.uses.end());
  for (auto& use : context.uses) {
    const auto capture = use->capture.lock();
    if (capture == nullptr) {
      continue;
    }
    use->output_sizes = output.sizes().vec();
    if (capture->receiver) {
      hooked.register_hook([use](const at::Tensor& gradient) {
        if (const auto receiving = use->capture.lock()) {
          receiving->receive(*use, gradient);
        }
      });
    } else {
      const std::lock_guard lock(capture->mutex);
      capture->uses.push_back(use);
      capture->outputs.push_back(edge);
    }
  }
}

void note_addition(const at::Tensor& output, const PendingUse& use) {
  const auto capture = use.capture.lock();
  if (capture != nullptr && !capture->receiver) {
    const std::lock_guard lock(capture->mutex);
    capture->additions.emplace_back(output.grad_fn(), last_product.node.lock());
  }
}

void end(const at::RecordFunction& function, at::ObserverContext* observed) {
  if (observed == nullptr) {
    return;
  }
  keep_errors([&] {
    auto& context = static_cast<CallContext&>(*observed);
    const auto& outputs = function.outputs();  // none if the operator has thrown
    if (outputs.empty() || !outputs.front().isTensor()) {
      return;
    }
    const at::Tensor& output = outputs.front().toTensor();
    for (auto& [use, bias] : context.completed) {
      use->layer.bias = bias;
      note_addition(output, *use);
    }
    if (!context.uses.empty() && output.requires_grad()) {
      note_output(output, context);
    }
  });
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

at::Tensor without_history(const at::Tensor& tensor) {
  return tensor.requires_grad() ? tensor.detach() : tensor;
}

}  // namespace

OperatorCapture::State::State(const std::vector<at::Tensor>& tensors, Receiver receiver)
    : receiver(std::move(receiver)) {
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
  const auto* executed = autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) {  // backward() of everything
    return true;
  }
  const auto impl = params[position].lock();
  if (impl == nullptr) {
    return false;
  }
  const auto node = autograd::impl::try_get_grad_accumulator(at::Tensor(impl));
  const auto found = executed->find(node.get());
  return found != executed->end() && found->second.needed_;
}

bool OperatorCapture::State::has_no_gradient(int64_t position) const {
  const auto impl = position < 0 ? nullptr : params[position].lock();
  return impl != nullptr && !at::Tensor(impl).grad().defined();
}

void OperatorCapture::State::receive(PendingUse& use, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const std::lock_guard lock(mutex);
  LayerUse layer = use.layer;
  // torch::autograd::grad() passes here too.
  layer.weight = layer.weight >= 0 && is_accumulated(layer.weight) ? layer.weight : -1;
  layer.bias = layer.bias >= 0 && is_accumulated(layer.bias) ? layer.bias : -1;
  if (!autograd::get_current_graph_task_keep_graph()) {
    use.layer.input = at::Tensor();  // the graph may outlive its last use
  }
  if (!gradient.defined() || !layer.input.defined() || (layer.weight < 0 && layer.bias < 0)) {
    return;
  }
  layer.output_gradient = without_history(gradient).reshape(use.output_sizes);
  const int64_t task = use.outer_task >= 0 ? use.outer_task : autograd::get_current_graph_task_id();
  const auto count = static_cast<int64_t>(micro_batches.size());
  layer.micro_batch = micro_batches.try_emplace(task, count).first->second;
  const bool weight_starts_anew = has_no_gradient(layer.weight);
  const bool bias_starts_anew = has_no_gradient(layer.bias);
  receiver({std::move(layer), weight_starts_anew, bias_starts_anew});
}

OperatorCapture::OperatorCapture(std::vector<at::Tensor> params, Receiver receiver)
    : state_(std::make_shared<State>(params, std::move(receiver))) {}

OperatorCapture::~OperatorCapture() { set_enabled(false); }

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

void OperatorCapture::forget() {
  const std::lock_guard lock(state_->mutex);
  state_->micro_batches.clear();
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

int64_t OperatorCapture::parameter_used_otherwise(const at::Tensor& loss) const {
  const std::lock_guard lock(state_->mutex);
  // Nodes behind which a use has its parameters, and where the graph goes on.
  std::unordered_map<autograd::Node*, autograd::Node*> next_of_use;
  for (size_t i = 0; i < state_->uses.size(); ++i) {
    next_of_use[state_->outputs[i].function.get()] = state_->uses[i]->input_node.get();
  }
  for (const auto& [sum, product] : state_->additions) {
    next_of_use[sum.get()] = product.get();
  }
  std::unordered_set<autograd::Node*> seen{nullptr};
  std::vector<autograd::Node*> waiting{loss.grad_fn().get()};
  while (!waiting.empty()) {
    autograd::Node* node = waiting.back();
    waiting.pop_back();
    if (!seen.insert(node).second) {
      continue;
    }
    if (const auto* leaf = dynamic_cast<const autograd::AccumulateGrad*>(node)) {
      const int64_t found = state_->position(leaf->variable);
      if (found >= 0) {
        return found;
      }
    }
    const auto use = next_of_use.find(node);
    if (use != next_of_use.end()) {
      waiting.push_back(use->second);
      continue;
    }
    for (const auto& edge : node->next_edges()) {
      waiting.push_back(edge.function.get());
    }
  }
  return -1;
}

std::vector<LayerUse> OperatorCapture::differentiate(const at::Tensor& loss) {
  const std::lock_guard lock(state_->mutex);
  const auto pending = std::exchange(state_->uses, {});
  const auto outputs = std::exchange(state_->outputs, {});
  state_->additions.clear();
  if (!loss.requires_grad()) {
    return {};
  }
  const auto gradients = autograd::Engine::get_default_engine().execute(
      {autograd::impl::gradient_edge(loss)}, {at::ones_like(loss)}, /*keep_graph=*/false,
      /*create_graph=*/false, /*accumulate_grad=*/false, outputs);
  std::vector<LayerUse> uses;
  for (size_t i = 0; i < pending.size(); ++i) {
    if (gradients[i].defined()) {
      uses.push_back(std::move(pending[i]->layer));
      uses.back().output_gradient = gradients[i].reshape(pending[i]->output_sizes);
    }
  }
  return uses;
}

}  // namespace torchium::gradients::detail
