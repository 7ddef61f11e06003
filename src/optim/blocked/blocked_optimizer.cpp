#include "torchium/optim/blocked_optimizer.h"

#include "optim/blocked/state_storage.h"
#include "optim/core/group_plans.h"
#include "optim/core/group_step.h"
#include "optim/core/option_checks.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torchium::optim {
namespace {

bool contains(const std::vector<std::string>& keys, const std::string& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

bool same_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
}

}  // namespace

BlockedOptimizer::BlockedOptimizer(std::unique_ptr<Options> defaults)
    : SecondOrderOptimizer(std::move(defaults)), plans_(std::make_unique<detail::GroupPlans>()) {}

BlockedOptimizer::~BlockedOptimizer() = default;
BlockedOptimizer::BlockedOptimizer(BlockedOptimizer&&) noexcept = default;
BlockedOptimizer& BlockedOptimizer::operator=(BlockedOptimizer&&) noexcept = default;

bool BlockedOptimizer::is_ready(const std::string& needed_layout, const at::Tensor& param) const {
  auto* state = static_cast<MatrixParamState*>(find_state(param));
  return state != nullptr && state->layout_ == needed_layout && param.sizes() == state->sizes_ &&
         state->is_of(param);
}

bool BlockedOptimizer::state_is_ready(const Options& options, const at::Tensor& param) const {
  if (!is_ready(layout(options), param)) {
    return false;
  }
  const auto needed = needed_buffers(options);
  const auto members = find_state(param)->parameter_shaped();
  return std::all_of(members.begin(), members.end(), [&](const auto& member) {
    return member.second->defined() || !contains(needed, member.first);
  });
}

bool BlockedOptimizer::all_ready(size_t group, const std::vector<at::Tensor>& active) const {
  const std::string needed_layout = layout(param_groups_[group].options());
  return std::all_of(active.begin(), active.end(),
                     [&](const at::Tensor& param) { return is_ready(needed_layout, param); });
}

// Refuses state that was made for other options or another shape, if that makes a difference.
void BlockedOptimizer::check_group_states(size_t group,
                                          const std::vector<at::Tensor>& active) const {
  const Options& options = param_groups_[group].options();
  if (all_ready(group, active)) {
    return;
  }
  for (const auto& param : param_groups_[group].params()) {
    auto* state = static_cast<MatrixParamState*>(find_state(param));
    if (state == nullptr || state_is_ready(options, param)) {
      continue;
    }
    const at::Tensor shape_alone = at::empty_like(param, param.options().device(at::kMeta));
    const auto fresh = make_empty_state();
    init_parameter_shaped(options, shape_alone, *fresh);
    bool fits = detail::slots_fit(init_storage(options, {shape_alone}), *state);
    const auto needed = fresh->parameter_shaped();
    const auto found = state->parameter_shaped();
    for (const auto k : c10::irange(needed.size())) {
      fits &= !needed[k].second->defined() || found[k].second->defined();
      fits &= !found[k].second->defined() || found[k].second->sizes() == param.sizes();
    }
    TORCH_CHECK_VALUE(fits, "the state of ", describe(param), " was made for shape ",
                      at::IntArrayRef(state->sizes_), " with ", state->layout_,
                      ", and a step with ", layout(options),
                      " cannot use it; change that back, or erase the parameter from state() to "
                      "start afresh");
    check_state(options, param, *state);
  }
}

void BlockedOptimizer::init_group_states(size_t group, const std::vector<at::Tensor>& active) {
  const Options& options = param_groups_[group].options();
  if (all_ready(group, active)) {
    for (const auto& param : param_groups_[group].params()) {
      if (SecondOrderParamState* state = find_state(param)) {
        fit_buffers(group, param, *state, /*is_new=*/false);
      }
    }
    return;
  }
  // All parameters with state are stacked again, in the order of the group, so that the layout of
  // the memory is a function of which parameters have state: a resumed run continues bit for bit.
  const std::unordered_set<at::TensorImpl*> wanted = [&] {
    std::unordered_set<at::TensorImpl*> impls;
    for (const auto& param : active) {
      impls.insert(param.unsafeGetTensorImpl());
    }
    return impls;
  }();
  std::vector<at::Tensor> params;
  std::vector<MatrixParamState*> states;
  std::vector<std::pair<at::Tensor, std::unique_ptr<SecondOrderParamState>>> created;
  for (const auto& param : param_groups_[group].params()) {
    auto* state = static_cast<MatrixParamState*>(find_state(param));
    if (state == nullptr) {
      if (wanted.count(param.unsafeGetTensorImpl()) == 0) {
        continue;
      }
      created.emplace_back(param, make_empty_state());
      state = static_cast<MatrixParamState*>(created.back().second.get());
      init_parameter_shaped(options, param, *state);
      fit_buffers(group, param, *state, /*is_new=*/true);
    } else {
      state->convert_to(param);
      fit_buffers(group, param, *state, /*is_new=*/false);
    }
    params.push_back(param);
    states.push_back(state);
  }
  detail::move_into_storage(init_storage(options, params), states,
                            [&](size_t i) { return describe(params[i]); });
  for (const auto i : c10::irange(states.size())) {
    states[i]->layout_ = layout(options);
    states[i]->sizes_ = params[i].sizes().vec();
  }
  for (auto& [param, state] : created) {
    add_state(param, std::move(state));
  }
}

// Creates what these options need. An average that begins late keeps the step count that it begins
// with; one that nothing needs now is dropped, since it would be of old gradients alone later.
void BlockedOptimizer::fit_buffers(size_t group, const at::Tensor& param,
                                   SecondOrderParamState& state, bool is_new) const {
  const Options& options = param_groups_[group].options();
  const Options* before =
      group < plans_->bound.size() && !is_new ? plans_->bound[group].options.get() : nullptr;
  const auto needed = needed_buffers(options);
  const auto starts = state.counts();
  for (const auto& [key, tensor] : state.parameter_shaped()) {
    const auto start = std::find_if(starts.begin(), starts.end(), [&](const auto& count) {
      return count.first == key + "_start";
    });
    const bool has_start = start != starts.end();
    if (!contains(needed, key)) {
      if (has_start) {
        tensor->reset();
        start->second->reset();
      }
    } else if (!tensor->defined() || (before != nullptr && begins_afresh(key, *before, options))) {
      *tensor = detail::parameter_shaped_zeros(param);
      if (has_start && !is_new) {
        *start->second = state.step().clone();
      }
    }
  }
}

// ---- plans

// Whether the plans are bound to what the groups hold now; hands them changed options.
bool BlockedOptimizer::is_bound() {
  if (plans_->bound.size() != param_groups_.size()) {
    return false;
  }
  std::unordered_map<detail::StepPlan*, size_t> seen;
  for (const auto group : c10::irange(param_groups_.size())) {
    detail::StepPlan* plan = nullptr;
    size_t* next = nullptr;
    for (const auto& param : param_groups_[group].params()) {
      if (plan == nullptr || plan->device() != param.device()) {
        const auto found = plans_->find(group, param.device());
        if (found == nullptr) {
          return false;
        }
        plan = found->plan.get();
        next = &seen[plan];
      }
      const size_t i = (*next)++;
      if (i >= plan->size() || !plan->param(i).is_same(param)) {
        return false;
      }
      const auto* state = static_cast<const MatrixParamState*>(find_state(param));
      const bool fits =
          plan->state(i).is_empty()
              ? state == nullptr || !state_is_ready(param_groups_[group].options(), param)
              : state != nullptr && state->consists_of(plan->state(i));
      if (!fits) {
        return false;
      }
    }
    if (!adopt_options(group)) {
      return false;
    }
  }
  return std::all_of(plans_->plans.begin(), plans_->plans.end(), [&](const auto& each) {
    const auto found = seen.find(each.plan.get());
    return each.plan->size() == (found == seen.end() ? 0 : found->second);
  });
}

// False if the state must follow the options.
bool BlockedOptimizer::adopt_options(size_t group) {
  const Options& options = param_groups_[group].options();
  detail::BoundOptions& bound = plans_->bound[group];
  if (equal_but_lr(*bound.options, options)) {
    return true;
  }
  if (bound.layout != layout(options) || bound.buffers != needed_buffers(options)) {
    return false;
  }
  bound.options = options.clone();
  for (detail::GroupPlan& each : plans_->plans) {
    if (each.group == group) {
      each.plan->set_options(options);
    }
  }
  return true;
}

// Plans the step of all groups; false where the plans have to be bound again.
bool BlockedOptimizer::prepare() {
  bool fits = true;
  for (detail::GroupPlan& each : plans_->plans) {
    fits = fits && each.plan->prepare();
  }
  return fits;
}

// Gives the states the counts that the plans have of them.
void BlockedOptimizer::keep_host_steps() {
  for (detail::GroupPlan& each : plans_->plans) {
    for (const auto i : c10::irange(each.plan->size())) {
      SecondOrderParamState* state = find_state(each.plan->param(i));
      if (state != nullptr && state->step().is_same(each.plan->state(i).step)) {
        host_step(*state) = each.plan->host_steps()[i];
      }
    }
  }
}

void BlockedOptimizer::bind() {
  plans_->bound.clear();  // until all is done
  std::vector<detail::BoundOptions> bound;
  std::unordered_set<const detail::StepPlan*> in_use;
  for (const auto group : c10::irange(param_groups_.size())) {
    const Options& options = param_groups_[group].options();
    for (auto& [device, params] : detail::split_by_device(param_groups_[group].params())) {
      detail::GroupPlan* each = plans_->find(group, device);
      if (each == nullptr) {
        TORCH_CHECK(!torchium::detail::is_capturing(device),
                    "step() cannot be captured yet: it is the first one; run a step before the "
                    "capture");
        plans_->plans.push_back({group, make_plan(device), {}});
        each = &plans_->plans.back();
      }
      std::vector<detail::NamedTensors> states;
      std::vector<int64_t> host_steps;
      for (const auto& param : params) {
        SecondOrderParamState* state = find_state(param);
        // State that is not ready is left out: a step of its parameter then binds the plans again.
        const bool is_ready = state != nullptr && state_is_ready(options, param);
        states.push_back(is_ready ? state->tensors() : detail::NamedTensors());
        host_steps.push_back(state != nullptr ? host_step(*state) : -1);
      }
      each->plan->set_options(options);
      each->plan->bind(std::move(params), states, std::move(host_steps));
      in_use.insert(each->plan.get());
    }
    bound.push_back({options.clone(), layout(options), needed_buffers(options)});
  }
  for (detail::GroupPlan& each : plans_->plans) {
    if (in_use.count(each.plan.get()) == 0) {  // may still have something to report
      each.plan->bind({}, {}, {});
    }
  }
  plans_->bound = std::move(bound);
}

void BlockedOptimizer::take_step(const ActiveParams& active) {
  if (!is_bound() || !prepare()) {
    for (const auto group : c10::irange(active.size())) {
      check_group_states(group, active[group]);
    }
    keep_host_steps();
    for (const auto group : c10::irange(active.size())) {
      init_group_states(group, active[group]);
    }
    bind();
    TORCH_CHECK(prepare(), "parameters, gradients or state changed during step()");
  }
  for (detail::GroupPlan& each : plans_->plans) {
    if (each.group < param_groups_.size()) {
      const double lr = param_groups_[each.group].options().get_lr();
      each.plan->step(each.lr.of_step(lr, each.plan->device(), !each.plan->host_decides()));
    }
  }
}

void BlockedOptimizer::renew_all_roots() {
  refuse_moved_from();
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  read_reports(/*wait=*/false);
  check_groups();
  std::vector<std::vector<at::Tensor>> with_state;
  for (const auto group : c10::irange(param_groups_.size())) {
    with_state.push_back(param_groups_[group].params());
    std::erase_if(with_state.back(),
                  [this](const at::Tensor& param) { return find_state(param) == nullptr; });
    check_group_states(group, with_state.back());
  }
  keep_host_steps();
  for (const auto group : c10::irange(param_groups_.size())) {
    init_group_states(group, with_state[group]);
  }
  if (!is_bound()) {
    bind();
  }
  for (detail::GroupPlan& each : plans_->plans) {
    each.plan->update_preconditioners();
  }
  read_reports(/*wait=*/false);
}

void BlockedOptimizer::read_reports(bool wait) {
  for (detail::GroupPlan& each : plans_->plans) {
    if (wait) {
      each.plan->request_report();
    }
    while (const auto failure = each.plan->next_failure(wait)) {
      raise_failure(each.group, *failure);
    }
  }
}

void BlockedOptimizer::forget_derived() {
  SecondOrderOptimizer::forget_derived();
  *plans_ = {};
}

int64_t BlockedOptimizer::graph_bytes(size_t group) const {
  refuse_moved_from();
  int64_t bytes = 0;
  for (const detail::GroupPlan& each : plans_->plans) {
    bytes += each.group == group ? each.plan->graph_bytes() : 0;
  }
  return bytes;
}

void BlockedOptimizer::sync_learning_rates() {
  refuse_moved_from();
  for (const auto& group : param_groups_) {
    detail::check_learning_rate(group.options().get_lr());
  }
  for (detail::GroupPlan& each : plans_->plans) {
    if (each.group < param_groups_.size()) {
      each.lr.sync(param_groups_[each.group].options().get_lr());
    }
  }
}

void BlockedOptimizer::fit_loaded(const Options& options, const std::vector<at::Tensor>& params,
                                  const std::vector<SecondOrderParamState*>& loaded,
                                  const std::vector<SecondOrderParamState*>& fitted) const {
  std::vector<MatrixParamState*> states;
  for (const auto i : c10::irange(fitted.size())) {
    const auto& source = static_cast<const MatrixParamState&>(*loaded[i]);
    states.push_back(static_cast<MatrixParamState*>(fitted[i]));
    states.back()->layout_ = layout(options);
    states.back()->sizes_ = params[i].sizes().vec();
    states.back()->statistics(source.statistics());
    states.back()->roots(source.roots());
    states.back()->root_failures(source.root_failures());
  }
  // Copies the matrices, so that nothing aliases the archive.
  detail::move_into_storage(init_storage(options, params), states,
                            [&](size_t i) { return describe(params[i]); });
  for (const auto i : c10::irange(states.size())) {
    check_state(options, params[i], *states[i]);
  }
}

std::vector<std::pair<std::string, at::Tensor>> MatrixParamState::tensors() const {
  auto result = SecondOrderParamState::tensors();
  const auto add_slots = [&](const std::string& key, const std::vector<at::Tensor>& slots) {
    for (const auto slot : c10::irange(slots.size())) {
      result.emplace_back(key + "." + std::to_string(slot), slots[slot]);
    }
  };
  add_slots("statistics", statistics());
  add_slots("roots", roots());
  add_slots("root_failures", root_failures());
  return result;
}

bool MatrixParamState::consists_of(const detail::ParameterState& tensors) const {
  return step().is_same(tensors.step) && same_tensors(statistics(), tensors.statistics) &&
         same_tensors(roots(), tensors.roots) &&
         same_tensors(root_failures(), tensors.root_failures);
}

bool MatrixParamState::is_of(const at::Tensor& param) {
  const auto dtype = detail::state_dtype(param);
  const auto lie_beside = [&](const std::vector<at::Tensor>& slots) {
    return std::all_of(slots.begin(), slots.end(),
                       [&](const at::Tensor& slot) { return slot.device() == param.device(); });
  };
  return SecondOrderParamState::is_of(param) && lie_beside(statistics()) && lie_beside(roots()) &&
         lie_beside(root_failures()) &&
         std::all_of(statistics().begin(), statistics().end(),
                     [&](const at::Tensor& slot) { return slot.scalar_type() == dtype; });
}

void MatrixParamState::serialize(torch::serialize::InputArchive& archive) {
  SecondOrderParamState::serialize(archive);
  // Slots are numbered: "statistics.0", "statistics.1", ...
  const auto read_slots = [&](const std::string& key) {
    std::vector<at::Tensor> slots;
    at::Tensor slot;
    while (archive.try_read(key + "." + std::to_string(slots.size()), slot, /*is_buffer=*/true)) {
      slots.push_back(std::move(slot));
      slot = at::Tensor();
    }
    return slots;
  };
  statistics(read_slots("statistics"));
  roots(read_slots("roots"));
  root_failures(read_slots("root_failures"));
}

}  // namespace torchium::optim
