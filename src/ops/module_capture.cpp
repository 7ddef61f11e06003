#include "ops/module_capture.h"

#include "gradients/capture/watched_products.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace torchium::ops {

namespace autograd = torch::autograd;
using gradients::detail::CaptureState;
using gradients::detail::KeptCall;
using gradients::detail::LayerCall;
using gradients::detail::ModuleLayer;
using gradients::detail::PendingCall;

namespace {

// Weight and bias as positions in the plan instead of the capture.
void use_positions_of(const optim::detail::JointPlan& plan, const CaptureState& state,
                      LayerCall& call) {
  for (int64_t* position : {&call.weight, &call.bias}) {
    *position = plan.position(state.param(*position));
  }
}

// Hooks of saved tensors are functions of Python, which may raise.
void save_input(PendingCall& call, const at::Tensor& input) {
  if (input.is_inference()) {  // autograd saves none
    call.layer.input = input;
  } else {
    call.saved_input =
        std::make_shared<autograd::SavedVariable>(input.detach(), /*is_output=*/false);
  }
}

}  // namespace

// Records that a backward pass goes through a module that has mixed samples.
struct ModuleCapture::MixingHook : public autograd::FunctionPreHook {
  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    const auto state = this->state.lock();
    const auto kept = this->kept.lock();
    if (state != nullptr && kept != nullptr) {
      const std::lock_guard lock(state->mutex);
      kept->mixing.try_emplace(state->current_pass(outer), number);
    }
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    gradients::detail::refuse_compiled_autograd();
  }

  std::weak_ptr<CaptureState> state;
  std::weak_ptr<Kept> kept;
  gradients::detail::BackwardPass outer;
  int64_t number = -1;
};

ModuleCapture::ModuleCapture(int64_t number, bool keeps)
    : state_(std::make_shared<CaptureState>(std::vector<at::Tensor>(), nullptr,
                                            /*finds_mixing=*/keeps)),
      kept_(keeps ? std::make_shared<Kept>() : nullptr) {
  state_->joins_passes = keeps;
  if (keeps) {
    state_->receiver = [kept = kept_](const PendingCall& pending, LayerCall layer,
                                      const std::vector<int64_t>& gone_passes) {
      keep_call(kept->calls, KeptCall(std::move(layer), pending.module->number), gone_passes);
    };
  } else {
    state_->on_start = [number] {
      static const auto started = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("torchium::backward_started", "")
                                      .typed<void(int64_t)>();
      started.call(number);
    };
  }
}

void ModuleCapture::watch(const std::vector<at::Tensor>& params) {
  const std::lock_guard lock(state_->mutex);
  state_->watch(params);
}

void ModuleCapture::describe(int64_t number, const std::vector<int64_t>& row, double eps,
                             std::vector<int64_t> padding, std::string padding_mode,
                             bool adds_height, bool moves_channels, std::string text,
                             const std::optional<at::Tensor>& weight,
                             const std::optional<at::Tensor>& bias,
                             const std::optional<at::Tensor>& mean,
                             const std::optional<at::Tensor>& variance) {
  TORCH_CHECK(row.empty() || row.size() == gradients::detail::kCallRowSize, "a row has ",
              row.size(), " integers instead of ", gradients::detail::kCallRowSize);
  auto layer = std::make_shared<ModuleLayer>();
  layer->number = number;
  layer->call = row.empty() ? LayerCall() : gradients::detail::call_from_row(row.data());
  layer->call.eps = eps;
  layer->weight = weight.value_or(at::Tensor());
  layer->bias = bias.value_or(at::Tensor());
  layer->call.mean = mean.value_or(at::Tensor());
  layer->call.variance = variance.value_or(at::Tensor());
  layer->padding = std::move(padding);
  layer->padding_mode = std::move(padding_mode);
  layer->adds_height = adds_height;
  layer->moves_channels = moves_channels;
  layer->text = std::move(text);
  const std::lock_guard lock(state_->mutex);
  layers_.resize(std::max(layers_.size(), static_cast<size_t>(number) + 1));
  layers_[number] = std::move(layer);
}

void ModuleCapture::begin_products(const std::vector<int64_t>& numbers, int64_t samples,
                                   const std::vector<int64_t>& received) {
  std::vector<at::Tensor> weights;
  {
    const std::lock_guard lock(state_->mutex);
    for (const int64_t number : numbers) {
      weights.push_back(layers_.at(number)->weight);
    }
  }
  const auto self = c10::intrusive_ptr<ModuleCapture>::reclaim_copy(this);
  gradients::detail::watch_products(
      this, std::move(weights),
      [=, inner = samples](const at::Tensor& output, const at::Tensor& input,
                           size_t index) mutable -> std::function<void()> {
        inner = input.dim() == 3 ? input.size(1) : inner;  // after other hooks
        const int64_t number = numbers[index];
        auto call = output.requires_grad() && inner > 0
                        ? self->pending_call(output, input, number, inner)
                        : nullptr;
        if (call == nullptr) {
          return nullptr;
        }
        const bool is_received =
            std::find(received.begin(), received.end(), number) != received.end();
        self->state_->add(call, output, is_received);
        if (!is_received) {
          return nullptr;
        }
        return [call, input] { save_input(*call, input); };
      });
}

void ModuleCapture::end_products(bool has_returned) {
  gradients::detail::end_watching_products(this, /*finishes=*/has_returned);
}

void ModuleCapture::add(const at::Tensor& output, const at::Tensor& input, int64_t number,
                        bool is_received, int64_t inner_samples) {
  const auto call = pending_call(output, input, number, inner_samples);
  if (call == nullptr) {
    return;
  }
  if (is_received) {
    save_input(*call, input);
  }
  state_->add(call, output, is_received);
}

std::shared_ptr<PendingCall> ModuleCapture::pending_call(const at::Tensor& output,
                                                         const at::Tensor& input, int64_t number,
                                                         int64_t inner_samples) {
  auto call = std::make_shared<PendingCall>();
  call->inner_samples = inner_samples;
  call->capture = state_;
  call->outer = gradients::detail::pass_of_forward();
  {
    const std::lock_guard lock(state_->mutex);
    call->module = layers_.at(number);
    call->layer = call->module->call;
    for (at::Tensor* statistic : {&call->layer.mean, &call->layer.variance}) {
      *statistic = statistic->defined() ? statistic->detach().clone() : at::Tensor();
    }
    call->layer.weight = state_->trainable_position(call->module->weight);
    call->layer.bias = state_->trainable_position(call->module->bias);
  }
  if (call->layer.weight < 0 && call->layer.bias < 0) {
    return nullptr;
  }
  const ModuleLayer& layer = *call->module;
  call->edges =
      gradients::detail::edges_of(call, input, call->layer.weight < 0 ? at::Tensor() : layer.weight,
                                  call->layer.bias < 0 ? at::Tensor() : layer.bias);
  call->output_sizes = output.sizes().vec();
  return call;
}

void ModuleCapture::enter_pass() {
  const auto pass = gradients::detail::pass_of_forward();
  if (pass.task >= 0) {
    const std::lock_guard lock(state_->mutex);
    state_->pass_of(pass);
  }
}

void ModuleCapture::add_mixing(const at::Tensor& output, int64_t number) {
  auto hook = std::make_unique<MixingHook>();
  hook->state = state_;
  hook->kept = kept_;
  hook->outer = gradients::detail::pass_of_forward();
  hook->number = number;
  autograd::impl::gradient_edge(output).function->add_pre_hook(std::move(hook));
}

void ModuleCapture::hand_to(c10::intrusive_ptr<optim::detail::JointPlan> plan) {
  const std::lock_guard lock(state_->mutex);
  state_->receiver = nullptr;
  if (plan) {
    state_->receiver = [plan = std::move(plan), state = state_.get()](
                           const PendingCall& pending, LayerCall call,
                           const std::vector<int64_t>& gone_passes) {
      call.input = core_input(pending, call.input);
      call.output_gradient = core_gradient(pending, call.output_gradient);
      use_positions_of(*plan, *state, call);
      plan->receive(std::move(call), gone_passes);
    };
  }
}

std::vector<at::Tensor> ModuleCapture::used_outside() {
  const std::lock_guard lock(state_->mutex);
  auto params = state_->uncaptured.found();
  std::erase_if(params, [&](const at::Tensor& param) { return state_->position(param) < 0; });
  return params;
}

std::vector<gradients::detail::DifferentiableCall> ModuleCapture::calls_of(
    const at::Tensor& outputs, const optim::detail::JointPlan& plan) {
  auto calls = state_->calls_of(outputs);
  const std::lock_guard lock(state_->mutex);
  for (auto& call : calls) {
    use_positions_of(plan, *state_, call.layer);
  }
  std::erase_if(calls,
                [](const auto& call) { return call.layer.weight < 0 && call.layer.bias < 0; });
  return calls;
}

void ModuleCapture::warn_of_gradients_without_calls() { state_->warn_of_gradients_without_calls(); }

void ModuleCapture::forget() {
  const std::lock_guard lock(state_->mutex);
  state_->forget();
  if (kept_) {
    kept_->calls.clear();
    kept_->mixing.clear();
  }
}

std::vector<ModuleCapture::Call> ModuleCapture::calls() {
  const auto param = [&](int64_t position) {
    const at::Tensor tensor = state_->param(position);
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  const std::lock_guard lock(state_->mutex);
  std::vector<Call> calls;
  for (const auto& [pass, of_pass] : kept_->calls) {
    for (const KeptCall& call : of_pass) {
      const LayerCall& layer = call.layer;
      calls.emplace_back(pass, call.module, layer.input, layer.output_gradient, param(layer.weight),
                         param(layer.bias), call.has_changed_input());
    }
  }
  return calls;
}

int64_t ModuleCapture::mixing_module() {
  const std::lock_guard lock(state_->mutex);
  for (const auto& [pass, number] : kept_->mixing) {
    if (kept_->calls.count(state_->first_pass(pass)) != 0) {
      return number;
    }
  }
  return -1;
}

bool ModuleCapture::is_mixed() {
  const std::lock_guard lock(state_->mutex);
  return std::any_of(kept_->calls.begin(), kept_->calls.end(),
                     [&](const auto& entry) { return state_->mixes_samples(entry.first); });
}

}  // namespace torchium::ops
