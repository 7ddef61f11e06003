#include "optim/core/step_plan.h"

#include "optim/core/state_checks.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace torchium::optim::detail {

// Not Tensor::grad(), which checks whether the parameter is a leaf.
const at::Tensor& gradient_of(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->grad();
}

bool StepPlan::Bound::is_unchanged() const {
  return param.is_unchanged() &&
         std::all_of(tensors.begin(), tensors.end(),
                     [](const SeenTensor& tensor) { return tensor.is_unchanged(); });
}

void StepPlan::bind(std::vector<at::Tensor> params, std::vector<ParameterState> states,
                    std::vector<int64_t> host_steps, const std::vector<NamedTensors>& more_state) {
  TORCH_CHECK_VALUE(params.size() == states.size() && params.size() == host_steps.size(),
                    "one state and one step count per parameter are needed, got ", states.size(),
                    " and ", host_steps.size(), " for ", params.size(), " parameters");
  bound_.clear();
  for (size_t i = 0; i < params.size(); ++i) {
    bound_.push_back({SeenTensor(std::move(params[i])), std::move(states[i]), {}});
    Bound& bound = bound_.back();
    for (const auto& [key, tensor] : bound.state.named()) {
      bound.tensors.emplace_back(tensor);
    }
    if (!more_state.empty()) {
      for (const auto& [key, tensor] : more_state[i]) {
        bound.tensors.emplace_back(tensor);
      }
    }
  }
  host_steps_ = std::move(host_steps);
  active_.clear();
  forget_planned();
}

std::vector<WorkspaceUse> StepPlan::workspaces() const {
  WorkspaceUse use{optimizer_name(), device_, static_cast<int64_t>(bound_.size())};
  TensorBytes bytes;
  for (const Bound& bound : bound_) {
    for (const SeenTensor& seen : bound.tensors) {
      use.state_bytes += seen.tensor().device() == device_ ? bytes.add(seen.tensor()) : 0;
    }
  }
  const GroupMemory own = memory(bytes);
  use.scratch_bytes = own.workspace + own.graphs;
  return bound_.empty() ? std::vector<WorkspaceUse>{} : std::vector{use};
}

GroupMemory StepPlan::memory(TensorBytes& counted) const {
  GroupMemory own;
  own.workspace = counted.add(kept_tensors());
  own.graphs = graph_bytes();
  return own;
}

bool StepPlan::is_unchanged() const {
  return std::all_of(bound_.begin(), bound_.end(),
                     [](const Bound& bound) { return bound.is_unchanged(); });
}

void StepPlan::forget_planned() {
  is_unfinished_ = false;
  graphs_.clear();
  if (std::exchange(is_captured_, false)) {
    captured_.push_back(std::move(planned_));
  }
  planned_.reset();
}

void StepPlan::forget_graphs(GraphMode mode) {
  graphs_.clear();
  graph_mode_ = mode;
}

bool StepPlan::prepare() {
  auto active = find_active();
  if (!active) {
    return false;
  }
  if (!is_planned(*active)) {
    choose(std::move(*active));
  }
  return true;
}

std::optional<std::vector<size_t>> StepPlan::find_active() const {
  std::vector<size_t> active;
  active.reserve(active_.size());
  for (size_t i = 0; i < bound_.size(); ++i) {
    const Bound& bound = bound_[i];
    const at::Tensor& grad = gradient_of(bound.param.tensor());
    if (!grad.defined()) {
      continue;
    }
    if (bound.state.is_empty() || !bound.is_unchanged() || !fits(grad, bound.param.tensor()) ||
        bound.param.tensor().device() != device_) {
      return std::nullopt;
    }
    active.push_back(i);
  }
  return active;
}

void StepPlan::choose(std::vector<size_t> active) {
  forget_planned();
  active_ = std::move(active);
  if (active_.empty()) {
    return;
  }
  std::vector<at::Tensor> params;
  StateList states;
  for (const size_t i : active_) {
    params.push_back(bound_[i].param.tensor());
    states.push_back(bound_[i].state);
  }
  state_bytes_ = 0;
  for (const ParameterState& state : states) {
    for (const auto& [key, tensor] : state.named()) {
      state_bytes_ += static_cast<int64_t>(tensor.nbytes());
    }
  }
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(device_);
  planned_ = plan(params, states, monitor_.status());
  active_params_ = std::make_shared<const std::vector<at::Tensor>>(std::move(params));
}

void StepPlan::step(const at::Tensor& lr, const at::Tensor& found_inf, const SharedInputs& shared) {
  if (active_.empty()) {
    return;
  }
  TORCH_CHECK(
      !host_decides() || !torchium::detail::is_capturing(device_),
      "step() cannot be captured in a CUDA graph: the host decides in it which roots are due. Use "
      "Shampoo with capturable=True, and update_preconditioners()");
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(device_);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const bool counts = !device_.is_cpu() && host_decides();
  const std::vector<int64_t> host_steps = counts ? known_steps(active_) : std::vector<int64_t>();
  for (const size_t i : active_) {  // unknown if the run throws
    host_steps_[i] = -1;
  }
  run(lr, host_steps,
      found_inf.defined() ? found_inf.to(device_, /*non_blocking=*/!device_.is_cpu()) : found_inf,
      shared);
  for (size_t k = 0; k < host_steps.size(); ++k) {  // replays do not count on the host
    host_steps_[active_[k]] = host_steps[k] + 1;
  }
  monitor_.set_step_params(active_params_);
  if (host_decides()) {
    note_roots();
  }
  report();
}

void StepPlan::run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf,
                   const SharedInputs& shared) {
  auto end = c10::make_scope_exit([&] { end_step(); });
  std::vector<at::Tensor> grads;
  grads.reserve(active_.size());
  for (const size_t i : active_) {
    grads.push_back(gradient_of(bound_[i].param.tensor()));
  }
  KnownMagnitudes of_active;
  for (size_t k = 0; !shared.known.empty() && k < active_.size(); ++k) {
    of_active.push_back(shared.known[active_[k]]);
  }
  planned_->set_known(std::move(of_active));
  planned_->set_end_of_stages(shared.end_stage);
  is_captured_ |= torchium::detail::is_capturing(device_);
  planned_->begin(std::move(grads));
  // A graph would end all stages at once.
  const bool has_graph = graph_mode_ != GraphMode::kNever && device_.is_cuda() && !shared.end_stage;
  const auto key = has_graph ? planned_->graph_key(host_steps) : std::nullopt;
  if (!key || !replay(*key, lr, host_steps, found_inf)) {
    planned_->run(lr, host_steps, found_inf);
  }
  if (planned_->defers()) {
    is_unfinished_ = true;
    end.release();
  }
}

void StepPlan::finish(const at::Tensor& lr, double decoupled_weight_decay) {
  if (!is_unfinished_) {
    return;
  }
  const auto end = c10::make_scope_exit([&] { abandon(); });
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(device_);
  planned_->finish(lr, decoupled_weight_decay);
}

void StepPlan::abandon() {
  if (std::exchange(is_unfinished_, false)) {
    end_step();
  }
}

void StepPlan::end_step() {
  planned_->set_end_of_stages({});
  planned_->end();
}

bool StepPlan::replay(const GraphKey& key, const at::Tensor& lr, at::IntArrayRef host_steps,
                      const at::Tensor& found_inf) {
  const std::vector<at::Tensor> own = planned_->inputs();
  std::vector<at::Tensor> inputs = own;
  if (lr.defined()) {
    inputs.push_back(lr);
  }
  const auto launch = [&](at::TensorList read, const at::Tensor& inf) {
    const auto restore = c10::make_scope_exit([&] { planned_->set_inputs(own); });
    planned_->set_inputs(read.slice(0, own.size()));
    planned_->run(lr.defined() ? read.back() : lr, host_steps, inf);
    return planned_->results();
  };
  const auto results = graphs_.run(graph_mode_, {key, inputs, found_inf, state_bytes_, launch});
  if (!results) {
    return false;
  }
  planned_->set_results(*results);
  for (const at::Tensor& param : *active_params_) {
    param.unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

// No event may be recorded in a capture. request_report() reports the status of such calls.
void StepPlan::report() {
  if (!torchium::detail::is_capturing(device_)) {
    monitor_.submit();
  }
}

std::vector<int64_t> StepPlan::known_steps(const std::vector<size_t>& of) {
  std::vector<size_t> unknown;
  std::vector<at::Tensor> steps;
  for (const size_t i : of) {
    if (host_steps_[i] < 0) {
      unknown.push_back(i);
      steps.push_back(bound_[i].state.step);
    }
  }
  if (!unknown.empty()) {
    const at::Tensor counts = device_.is_cpu() ? at::Tensor() : at::stack(steps).cpu();
    settle_reports();  // earlier skips are not in the counts
    for (size_t k = 0; k < unknown.size(); ++k) {
      const at::Tensor count = counts.defined() ? counts[k] : steps[k];
      host_steps_[unknown[k]] = static_cast<int64_t>(count.item<double>());
    }
  }
  std::vector<int64_t> known;
  known.reserve(of.size());
  for (const size_t i : of) {
    known.push_back(host_steps_[i]);
  }
  return known;
}

void StepPlan::follow_to(c10::Device device) {
  if (device != device_) {
    take_reports(/*wait=*/true);
    forget_planned();
    device_ = device;
    graphs_ = StepGraphs(device);
    monitor_ = StepMonitor(device);
  }
}

void StepPlan::note_skip(const std::vector<at::Tensor>& params) {
  std::unordered_set<const at::TensorImpl*> skipped;
  for (const at::Tensor& param : params) {
    skipped.insert(param.unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < bound_.size(); ++i) {
    if (host_steps_[i] > 0 && skipped.count(bound_[i].param.tensor().unsafeGetTensorImpl()) != 0) {
      --host_steps_[i];
    }
  }
}

std::optional<StepReport> StepPlan::next_failure(bool wait) {
  take_reports(wait);
  if (failures_.empty()) {
    return std::nullopt;
  }
  StepReport failure = std::move(failures_.front());
  failures_.pop_front();
  return failure;
}

void StepPlan::take_reports(bool wait) {
  if ((!wait && settles_reports()) || torchium::detail::is_capturing(device_)) {
    return;  // events must not be queried in a capture
  }
  while (auto report = monitor_.next(wait)) {
    if (report->skipped && report->step_params) {
      if (settles_reports()) {
        skips_.push_back(report->step_params);
      } else {
        note_skip(*report->step_params);
      }
    }
    if (report->entries[kConsecutiveSkips] > 0 || report->entries[kConsecutiveRootFailures] > 0) {
      failures_.push_back(std::move(*report));
    }
  }
}

void StepPlan::settle_reports() {
  take_reports(/*wait=*/settles_reports());
  for (const TensorVector& params : std::exchange(skips_, {})) {
    note_skip(*params);
  }
}

}  // namespace torchium::optim::detail
