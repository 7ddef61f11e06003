#include "torchium/optim/second_order_optimizer.h"

#include "optim/group_runtime.h"
#include "optim/group_step.h"
#include "optim/state_stacks.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>

namespace torchium::optim {
namespace {

// Refuses what the core does not take. `what` and `name` say which tensor it is.
template <typename Name>
void check_dense_real(const at::Tensor& tensor, const char* what, Name&& name) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, what, name(), " has layout ", tensor.layout(),
                    "; only dense tensors are supported");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      what, name(), " has dtype ", dtype, "; only Float, Double, BFloat16 and Half are supported");
  TORCH_CHECK_VALUE(!tensor.unsafeGetTensorImpl()->is_python_dispatch(), what, name(),
                    " is a tensor subclass (for example a DTensor); only plain tensors are "
                    "supported");
}

// The parameters of each device, in order.
std::vector<std::pair<c10::Device, std::vector<at::Tensor>>> split_by_device(
    std::vector<at::Tensor> params) {
  std::vector<std::pair<c10::Device, std::vector<at::Tensor>>> result;
  for (auto& param : params) {
    auto found = std::find_if(result.begin(), result.end(),
                              [&](const auto& entry) { return entry.first == param.device(); });
    if (found == result.end()) {
      found = result.emplace(result.end(), param.device(), std::vector<at::Tensor>());
    }
    found->second.push_back(std::move(param));
  }
  return result;
}

}  // namespace

SecondOrderOptimizer::SecondOrderOptimizer(std::unique_ptr<Options> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)),
      runtimes_(std::make_unique<detail::GroupRuntimes>()) {}

SecondOrderOptimizer::~SecondOrderOptimizer() = default;
SecondOrderOptimizer::SecondOrderOptimizer(SecondOrderOptimizer&&) noexcept = default;
SecondOrderOptimizer& SecondOrderOptimizer::operator=(SecondOrderOptimizer&&) noexcept = default;

void SecondOrderOptimizer::initialize(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  check_options(defaults());
  for (const auto& group : param_groups) {
    add_param_group(group);
  }
}

void SecondOrderOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  const auto& params = param_group.params();
  check_group(param_group.has_options() ? param_group.options() : defaults(), params,
              param_groups_.size());
  std::unordered_set<const void*> known;
  for (const auto& group : param_groups_) {
    for (const auto& param : group.params()) {
      known.insert(param.unsafeGetTensorImpl());
    }
  }
  for (const auto i : c10::irange(params.size())) {
    TORCH_CHECK_VALUE(params[i].is_leaf(), "parameter ", i, " of group ", param_groups_.size(),
                      " is not a leaf of the autograd graph; optimize the tensors it is made of");
    TORCH_CHECK_VALUE(known.insert(params[i].unsafeGetTensorImpl()).second, "parameter ", i,
                      " of group ", param_groups_.size(),
                      " is in the optimizer already; pass each parameter once");
  }
  Optimizer::add_param_group(param_group);
  if (param_group.has_options()) {  // newer versions of libtorch mix them with the defaults
    param_groups_.back().set_options(param_group.options().clone());
  }
}

void SecondOrderOptimizer::check_group(const Options& options,
                                       const std::vector<at::Tensor>& params, size_t group) const {
  check_options(options);
  for (const auto i : c10::irange(params.size())) {
    TORCH_CHECK_VALUE(params[i].defined(), "parameter ", i, " of group ", group, " is undefined");
    check_dense_real(params[i], "parameter ",
                     [&] { return std::to_string(i) + " of group " + std::to_string(group); });
  }
}

std::vector<at::Tensor> SecondOrderOptimizer::params_with_gradient(size_t group) const {
  std::vector<at::Tensor> active;
  for (const auto& param : param_groups_[group].params()) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) {
      continue;
    }
    check_dense_real(grad, "the gradient of ", [&] { return describe(param); });
    TORCH_CHECK_VALUE(grad.sizes() == param.sizes() && grad.device() == param.device(),
                      "the gradient of ", describe(param), " has shape ", grad.sizes(), " on ",
                      grad.device(), "; it must have the shape and device of the parameter");
    active.push_back(param);
  }
  return active;
}

void SecondOrderOptimizer::check_capture(const Options& options,
                                         const std::vector<at::Tensor>& active) const {
  std::optional<c10::Device> checked;
  for (const auto& param : active) {
    if (param.is_cpu() || (checked == param.device() && find_state(param) != nullptr)) {
      continue;
    }
    checked = param.device();
    if (torchium::detail::is_capturing(param.device())) {
      TORCH_CHECK(capturable(options),
                  "step() cannot be captured in a CUDA graph: the host decides in it which roots "
                  "are due. Use Shampoo with capturable = true, and update_preconditioners()");
      TORCH_CHECK(find_state(param) != nullptr, "step() cannot be captured yet: the state of ",
                  describe(param), " has to be created; run some steps before the capture");
    }
  }
}

at::Tensor SecondOrderOptimizer::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  read_reports(/*wait=*/false);
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // All groups are checked before any is changed.
  std::vector<std::vector<at::Tensor>> active;
  for (const auto group : c10::irange(param_groups_.size())) {
    check_group(param_groups_[group].options(), param_groups_[group].params(), group);
    active.push_back(params_with_gradient(group));
    check_capture(param_groups_[group].options(), active.back());
  }
  for (const auto group : c10::irange(param_groups_.size())) {
    init_states(group, active[group]);
  }
  for (const auto group : c10::irange(param_groups_.size())) {
    run_group(group, std::move(active[group]));
  }
  read_reports(/*wait=*/false);
  return loss;
}

void SecondOrderOptimizer::update_groups(const GroupUpdate& update) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  read_reports(/*wait=*/false);
  for (const auto group : c10::irange(param_groups_.size())) {
    check_group(param_groups_[group].options(), param_groups_[group].params(), group);
  }
  for (const auto group : c10::irange(param_groups_.size())) {
    std::vector<at::Tensor> params = param_groups_[group].params();
    std::erase_if(params, [this](const at::Tensor& param) { return find_state(param) == nullptr; });
    for (auto& [device, on_device] : split_by_device(std::move(params))) {
      TORCH_CHECK(!torchium::detail::is_capturing(device),
                  "update_preconditioners() cannot be captured in a CUDA graph: the eigenvalue "
                  "solver of the roots waits for the device");
      detail::GroupRuntime& runtime = runtimes_->at(group, device);
      detail::GroupStep step;
      step.params = std::move(on_device);
      step.states = states_of(step.params);
      step.status = runtime.monitor().status();
      update(param_groups_[group].options(), step);
      finish_call(runtime, std::move(step.params), /*is_step=*/false);
    }
  }
  read_reports(/*wait=*/false);
}

bool SecondOrderOptimizer::capturable(const Options& options) const { return false; }

void SecondOrderOptimizer::init_states(size_t group, const std::vector<at::Tensor>& active) {
  const bool missing = std::any_of(active.begin(), active.end(), [this](const at::Tensor& param) {
    return find_state(param) == nullptr;
  });
  if (!missing) {
    return;
  }
  // All parameters with state are stacked again, in the order of the group, so that the layout of
  // the memory is a function of which parameters have state: a resumed run continues bit for bit.
  const Options& options = param_groups_[group].options();
  const std::unordered_set<at::TensorImpl*> wanted = [&] {
    std::unordered_set<at::TensorImpl*> impls;
    for (const auto& param : active) {
      impls.insert(param.unsafeGetTensorImpl());
    }
    return impls;
  }();
  std::vector<at::Tensor> params;
  std::vector<MatrixParamState*> states;
  std::vector<std::pair<at::Tensor, std::unique_ptr<MatrixParamState>>> created;
  for (const auto& param : param_groups_[group].params()) {
    MatrixParamState* state = find_state(param);
    if (state == nullptr) {
      if (wanted.count(param.unsafeGetTensorImpl()) == 0) {
        continue;
      }
      created.emplace_back(param, make_empty_state());
      state = created.back().second.get();
      init_parameter_shaped(options, param, *state);
    }
    params.push_back(param);
    states.push_back(state);
  }
  detail::move_into_stacks(init_stacks(options, params), states,
                           [&](size_t i) { return describe(params[i]); });
  for (auto& [param, state] : created) {
    state->step(at::zeros({}, param.options().dtype(at::kFloat).requires_grad(false)));
    state->host_step_ = 0;
    state_[param.unsafeGetTensorImpl()] = std::move(state);
  }
}

void SecondOrderOptimizer::run_group(size_t group, std::vector<at::Tensor> params) {
  const Options& options = param_groups_[group].options();
  for (auto& [device, on_device] : split_by_device(std::move(params))) {
    detail::GroupRuntime& runtime = runtimes_->at(group, device);
    const bool host_decides = !device.is_cpu() && !capturable(options);
    detail::GroupStep step;
    step.params = std::move(on_device);
    step.states = states_of(step.params);
    for (const auto& param : step.params) {
      step.grads.push_back(param.grad());
    }
    step.lr = runtime.learning_rate(options.get_lr(), capturable(options));
    step.status = runtime.monitor().status();
    if (host_decides) {
      step.host_steps = host_steps(step.states);
    }
    step_group(options, step);
    for (auto* state : step.states) {
      // A replayed graph advances only the device's count.
      state->host_step_ = host_decides ? state->host_step_ + 1 : -1;
    }
    finish_call(runtime, std::move(step.params), /*is_step=*/true);
  }
}

void SecondOrderOptimizer::finish_call(detail::GroupRuntime& runtime,
                                       std::vector<at::Tensor> params, bool is_step) {
  const auto shared = std::make_shared<const std::vector<at::Tensor>>(std::move(params));
  const bool is_capturable = capturable(param_groups_[runtime.group()].options());
  if (is_step) {
    runtime.monitor().set_step_params(shared);
  }
  if (!is_step || !is_capturable) {
    runtime.monitor().set_root_params(shared);
  }
  // An event must not be recorded in a capture: check_errors() reads the status of such calls.
  if (runtime.monitor().status().is_cpu() || !is_capturable) {
    runtime.monitor().submit();
  }
}

std::vector<int64_t> SecondOrderOptimizer::host_steps(
    const std::vector<MatrixParamState*>& states) const {
  std::vector<MatrixParamState*> unknown;
  std::vector<at::Tensor> steps;
  for (auto* state : states) {
    if (state->host_step_ < 0) {
      unknown.push_back(state);
      steps.push_back(state->step());
    }
  }
  if (!unknown.empty()) {  // after a load, or after captured steps
    const at::Tensor counts = at::stack(steps).cpu();
    for (const auto i : c10::irange(unknown.size())) {
      unknown[i]->host_step_ = static_cast<int64_t>(counts.const_data_ptr<float>()[i]);
    }
  }
  std::vector<int64_t> result;
  result.reserve(states.size());
  for (const auto* state : states) {
    result.push_back(state->host_step_);
  }
  return result;
}

void SecondOrderOptimizer::check_errors() {
  runtimes_->for_each([](detail::GroupRuntime& runtime) { runtime.monitor().submit(); });
  read_reports(/*wait=*/true);
}

void SecondOrderOptimizer::read_reports(bool wait) {
  runtimes_->for_each([&](detail::GroupRuntime& runtime) {
    if (runtime.group() >= param_groups_.size()) {  // removed by hand since
      return;
    }
    if (torchium::detail::is_capturing(runtime.device())) {  // events must not be queried now
      return;
    }
    const Options& options = param_groups_[runtime.group()].options();
    while (const auto report = runtime.monitor().next(wait)) {
      if (report->skipped && report->step_params) {
        for (const auto& param : *report->step_params) {
          MatrixParamState* state = find_state(param);
          if (state != nullptr && state->host_step_ > 0) {
            --state->host_step_;
          }
        }
      }
      const auto skips = report->entries[detail::kConsecutiveSkips];
      TORCH_CHECK(
          skips < detail::kMaxConsecutiveSkips, skips,
          " steps in a row had a gradient that is not finite and were skipped, the last one "
          "that of ",
          describe(report->non_finite_parameter), "; lower lr, clip gradients or scale the loss");
      const auto failures = report->entries[detail::kConsecutiveRootFailures];
      TORCH_CHECK(failures < max_root_failures(options), "the root of a preconditioner of ",
                  describe(report->failed_parameter), " failed ", failures,
                  " times in a row; raise eps or relative_eps");
    }
  });
}

void SecondOrderOptimizer::sync_learning_rates() {
  runtimes_->for_each([&](detail::GroupRuntime& runtime) {
    if (runtime.group() < param_groups_.size()) {
      runtime.sync_learning_rate(param_groups_[runtime.group()].options().get_lr());
    }
  });
}

MatrixParamState* SecondOrderOptimizer::find_state(const at::Tensor& param) const {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : static_cast<MatrixParamState*>(found->second.get());
}

std::vector<MatrixParamState*> SecondOrderOptimizer::states_of(
    const std::vector<at::Tensor>& params) const {
  std::vector<MatrixParamState*> states;
  states.reserve(params.size());
  for (const auto& param : params) {
    states.push_back(find_state(param));
  }
  return states;
}

std::string SecondOrderOptimizer::describe(const at::Tensor& param) const {
  for (const auto group : c10::irange(param_groups_.size())) {
    const auto& params = param_groups_[group].params();
    for (const auto i : c10::irange(params.size())) {
      if (params[i].is_same(param)) {
        return c10::str("parameter ", i, " of group ", group, " (shape ", param.sizes(), ")");
      }
    }
  }
  return "a parameter";
}

}  // namespace torchium::optim
