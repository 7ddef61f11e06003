#include "optim/capture/joint_plan.h"

#include "optim/core/state_checks.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <set>
#include <utility>

namespace torchium::optim::detail {
namespace {

std::unique_ptr<SecondOrderParamState> copy_of(const SecondOrderParamState& state) {
  return std::unique_ptr<SecondOrderParamState>(
      static_cast<SecondOrderParamState*>(state.clone().release()));
}

}  // namespace

void append_changes(int64_t param, const SecondOrderParamState& before,
                    const SecondOrderParamState& after, StateChanges& changes) {
  std::unordered_map<std::string, at::Tensor> left;
  for (auto& [key, tensor] : before.tensors()) {
    left.emplace(key, tensor);
  }
  for (auto& [key, tensor] : after.tensors()) {
    const auto found = left.find(key);
    if (found == left.end() || !found->second.is_same(tensor)) {
      changes.emplace_back(param, key, tensor);
    }
    if (found != left.end()) {
      left.erase(found);
    }
  }
  for (const auto& [key, tensor] : left) {
    changes.emplace_back(param, key, std::nullopt);
  }
}

void JointPlan::refuse_capture(c10::Device device, const char* why) const {
  TORCH_CHECK(!torchium::detail::is_capturing(device),
              "a CUDA graph cannot capture this call: ", why,
              " Use KFAC or NaturalGradient with capturable=True, and run a step before the "
              "capture");
}

void JointPlan::bind(std::vector<at::Tensor> params, const std::vector<NamedTensors>& states,
                     std::vector<int64_t> groups, std::vector<std::string> names) {
  TORCH_CHECK_VALUE(params.size() == states.size() && params.size() == groups.size() &&
                        params.size() == names.size(),
                    "one state, group and name per parameter are needed, got ", states.size(), ", ",
                    groups.size(), " and ", names.size(), " for ", params.size(), " parameters");
  const auto with_gradient =
      std::find_if(params.begin(), params.end(),
                   [](const at::Tensor& param) { return gradient_of(param).defined(); });
  if (!params.empty()) {
    const at::Tensor& first = with_gradient == params.end() ? params.front() : *with_gradient;
    refuse_capture(first.device(), "parameters or their state are new.");
    follow_to(first.device());
  }
  std::unordered_map<const at::TensorImpl*, int64_t> known;  // by `step`
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i]->step().defined() && host_steps()[i] >= 0) {
      known.emplace(states_[i]->step().unsafeGetTensorImpl(), host_steps()[i]);
    }
  }
  for (const at::Tensor& step : fresh_steps_) {
    known.emplace(step.unsafeGetTensorImpl(), 0);
  }

  std::vector<std::unique_ptr<SecondOrderParamState>> own;
  std::vector<ParameterState> shared;
  std::vector<NamedTensors> own_tensors;
  std::vector<int64_t> counts;
  for (const NamedTensors& state : states) {
    own.push_back(make_state());
    for (const auto& [key, tensor] : state) {
      own.back()->assign(key, tensor);
    }
    own_tensors.push_back(own.back()->tensors());
    shared.emplace_back(own_tensors.back());
    const auto found = known.find(own.back()->step().unsafeGetTensorImpl());
    counts.push_back(found == known.end() ? -1 : found->second);
  }
  positions_.clear();
  for (const at::Tensor& param : params) {
    positions_.emplace(param.unsafeGetTensorImpl(), static_cast<int64_t>(positions_.size()));
  }
  StepPlan::bind(std::move(params), std::move(shared), std::move(counts), own_tensors);
  states_ = std::move(own);
  groups_ = std::move(groups);
  names_ = std::move(names);
  fresh_steps_.clear();
  std::erase_if(excluded_, [&](const auto* impl) { return positions_.count(impl) == 0; });
  after_bind();
}

bool JointPlan::is_bound_to(size_t i, const SecondOrderParamState* state) const {
  return state == nullptr ? !states_[i]->step().defined() : states_[i]->has_tensors_of(*state);
}

int64_t JointPlan::position(const at::Tensor& param) const {
  const auto found =
      param.defined() ? positions_.find(param.unsafeGetTensorImpl()) : positions_.end();
  return found == positions_.end() ? -1 : found->second;
}

void JointPlan::exclude(const std::vector<int64_t>& params) {
  excluded_.clear();
  for (const int64_t i : params) {
    excluded_.insert(param(i).unsafeGetTensorImpl());
  }
}

void JointPlan::record_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                                 const std::vector<gradients::detail::DifferentiableCall>& calls) {
  check_origin(outputs, optimizer_name(), calls,
               [&](const at::Tensor& param) { return position(param) >= 0; });
  const std::lock_guard lock(curvature_mutex_);
  try {
    add_curvature(outputs, curvature, calls);
  } catch (...) {
    forget();
    throw;
  }
}

void JointPlan::withdraw() {
  if (is_shared()) {
    const c10::DeviceGuard device_guard(device());
    distributed::StepFindings findings;
    findings.has_error = true;
    distributed::agree(findings, *ranks_, {});
  }
}

void JointPlan::agree_to(const std::string& call, const std::function<void()>& check) {
  const c10::DeviceGuard device_guard(device());
  try {
    check();
  } catch (...) {
    withdraw();
    throw;
  }
  if (is_shared()) {
    distributed::agree(distributed::findings_of_call(call), *ranks_, {});
  }
}

StateChanges JointPlan::take(const JointInputs& inputs) {
  const c10::DeviceGuard device_guard(device());
  return take_agreed(is_shared() ? agree(inputs) : inputs);
}

distributed::StepFindings JointPlan::own_findings(const JointInputs& inputs) {
  distributed::Hash hash;
  add_to_setup(hash);
  for (const at::Tensor& lr : inputs.lrs) {
    hash.add(lr.is_cpu() ? lr.item<double>() : 0.0);
  }
  distributed::StepFindings own;
  for (size_t i = 0; i < size(); ++i) {
    hash.add(names_[i]).add(groups_[i]).add(static_cast<int64_t>(param(i).scalar_type()));
    for (const int64_t size : param(i).sizes()) {
      hash.add(size);
    }
    own.mask.push_back(gradient_of(param(i)).defined() ? 1 : 0);
  }
  own.setup = hash.value();
  own.found_inf = inputs.found_inf.defined() &&
                  (combines_found_inf(inputs.found_inf) || inputs.found_inf.item<double>() != 0.0);
  add_layers(own);
  // Parameters that are the weight of no layer have their step counts instead: even, and above 0.
  own.layers.resize(size(), 0);
  const std::vector<int64_t> taken = steps_taken();
  for (size_t i = 0; i < size(); ++i) {
    if (own.layers[i] == 0) {
      own.layers[i] = 2 * (taken[i] + 1);
    }
  }
  return own;
}

JointInputs JointPlan::agree(const JointInputs& inputs) {
  distributed::StepFindings own;
  try {
    own = own_findings(inputs);
  } catch (...) {
    withdraw();
    throw;
  }
  own.has_error = std::exchange(has_left_step_, false);
  const distributed::StepFindings all = distributed::agree(own, *ranks_, names_);
  TORCH_CHECK(!own.has_error,
              "this rank raised an error in the middle of its last step(), which other ranks took; "
              "continue from a checkpoint");
  settle_reports();  // of the steps before
  take_findings(all);
  JointInputs agreed = inputs;
  if (all.found_inf) {
    agreed.found_inf = joint_found_inf(inputs.found_inf);
  }
  return agreed;
}

// Whether the ranks combine it on the device, so that the host does not wait for it.
bool JointPlan::combines_found_inf(const at::Tensor& found_inf) const {
  return !device().is_cpu() && !found_inf.is_cpu();
}

// Whether a scaler of any rank has found infinities. Called if one has, or if only the device
// knows.
at::Tensor JointPlan::joint_found_inf(const at::Tensor& own) const {
  const auto options = at::TensorOptions(device()).dtype(at::kFloat);
  if (device().is_cpu()) {
    return at::ones({1}, options);
  }
  at::Tensor joint = own.defined() ? own.to(options).view({1}).clone() : at::zeros({1}, options);
  ranks_->all_reduce_max_(joint);
  return joint;
}

DampingLosses JointPlan::joint_losses(const DampingLosses& own) const {
  const c10::DeviceGuard device_guard(device());
  return is_shared() ? mean_over_ranks(own, *ranks_) : own;
}

bool JointPlan::prepare() {
  if (host_decides()) {
    refuse_capture(device(), "the host decides in step() what is due.");
  }
  TORCH_CHECK_VALUE(host_decides() || !is_shared(), optimizer_name(),
                    " has capturable=True and a process_group, but its ranks agree on each step by "
                    "their hosts; use capturable=False");
  auto active = find_active();
  if (!active) {
    return false;
  }
  if (!active->empty()) {
    check_all(*active);
  }
  const bool is_new = derive(*active);
  if (is_new || !is_planned(*active)) {
    refuse_capture(device(), "the step is another one than the last.");
    if (!changes_for(*active).empty()) {
      return false;
    }
    choose(std::move(*active));
  }
  return true;
}

StateChanges JointPlan::missing_state() {
  std::vector<size_t> active;
  std::set<std::string> devices;
  for (size_t i = 0; i < size(); ++i) {
    const at::Tensor& grad = gradient_of(param(i));
    if (grad.defined()) {
      check_parameter(param(i), name(i));
      check_gradient(grad, param(i), name(i));
      active.push_back(i);
      devices.insert(param(i).device().str());
    }
  }
  TORCH_CHECK_VALUE(devices.size() < 2, optimizer_name(),
                    " needs all parameters on one device, got gradients on ", *devices.begin(),
                    " and ", *devices.rbegin(), "; use one optimizer per device");
  if (active.empty()) {
    return {};
  }
  check_all(active);
  derive(active);
  return changes_for(active);
}

StateChanges JointPlan::changes_for(const std::vector<size_t>& active) {
  const c10::NoGradGuard no_grad;
  before_completing();
  StateChanges changes;
  for (const size_t i : active) {
    const auto state = copy_of(*states_[i]);
    if (!state->step().defined()) {
      state->step(at::zeros({}, at::TensorOptions(at::kDouble).device(param(i).device())));
      fresh_steps_.push_back(state->step());
    } else if (!state->is_of(param(i))) {
      state->convert_to(param(i));
    }
    complete(i, *state);
    append_changes(static_cast<int64_t>(i), *states_[i], *state, changes);
  }
  return changes;
}

void JointPlan::check_all(const std::vector<size_t>& active) {
  if (!is_planned(active)) {
    for (const size_t i : active) {
      for (const auto& [key, tensor] : states_[i]->parameter_shaped()) {
        TORCH_CHECK_VALUE(!tensor->defined() || tensor->sizes() == param(i).sizes(), name(i),
                          " has got another shape since its '", key, "' ", tensor->sizes(),
                          " was made; delete its state to start afresh");
      }
    }
  }
  check(active);
}

NamedTensors JointPlan::load(const at::Tensor& param, const NamedTensors& saved,
                             const torch::optim::OptimizerOptions& options, int64_t params,
                             const std::string& name) const {
  const auto old = make_state();
  for (const auto& [key, tensor] : saved) {
    old->assign(key, tensor);
  }
  const auto fresh = make_state();
  fresh->step(at::zeros({}, at::TensorOptions(at::kDouble).device(param.device())));
  make_room(*fresh, *old, param, options, params, name);
  return loaded_state(fresh->tensors(), saved, {{"momentum_buffer"}, {}}, param, name);
}

std::vector<int64_t> JointPlan::steps_taken() {
  std::vector<size_t> with_state;
  for (size_t i = 0; i < size(); ++i) {
    if (states_[i]->step().defined()) {
      with_state.push_back(i);
    }
  }
  const auto known = known_steps(with_state);
  std::vector<int64_t> taken(size(), 0);
  for (size_t k = 0; k < with_state.size(); ++k) {
    taken[with_state[k]] = known[k];
  }
  return taken;
}

std::vector<int64_t> JointPlan::next_steps(size_t groups) {
  take_reports(/*wait=*/false);
  std::vector<int64_t> next(groups, 1);
  const auto taken = steps_taken();
  for (size_t i = 0; i < size(); ++i) {
    int64_t& number = next.at(static_cast<size_t>(groups_[i]));
    number = std::max(number, taken[i] + 1);
  }
  return next;
}

MemoryReport JointPlan::memory_report(const std::vector<at::Tensor>& params,
                                      const std::vector<NamedTensors>& states,
                                      const std::vector<int64_t>& groups_of_params,
                                      const std::vector<std::string>& names, size_t groups) const {
  MemoryReport report;
  report.groups.resize(groups);
  TensorBytes bytes;
  for (size_t i = 0; i < params.size(); ++i) {
    add_parameter(report, static_cast<size_t>(groups_of_params[i]), params[i], names[i], states[i],
                  bytes);
  }
  report.joint = memory(bytes);
  return report;
}

bool JointPlan::only_creates_state() {
  const auto taken = steps_taken();
  if (std::any_of(taken.begin(), taken.end(), [](int64_t count) { return count > 0; })) {
    return false;
  }
  for (size_t i = 0; i < size(); ++i) {
    const at::Tensor& grad = gradient_of(param(i));
    if (grad.defined() && grad.any().item<bool>()) {
      return false;
    }
  }
  return true;
}

at::Tensor JointPlan::learning_rate(size_t group, double lr) {
  learning_rates_.resize(std::max(learning_rates_.size(), group + 1));
  return learning_rates_[group].of_step(lr, device(), !host_decides() && !device().is_cpu());
}

void JointPlan::sync_learning_rates(const std::vector<double>& lrs) {
  for (size_t g = 0; g < std::min(lrs.size(), learning_rates_.size()); ++g) {
    learning_rates_[g].sync(lrs[g]);
  }
}

std::vector<at::Tensor> JointPlan::learning_rates(const JointInputs& inputs) const {
  std::vector<at::Tensor> lrs;
  for (const size_t i : active()) {
    lrs.push_back(inputs.lrs.at(static_cast<size_t>(groups_[i])));
  }
  return lrs;
}

}  // namespace torchium::optim::detail
