#include "torchium/optim/stacked_optimizer.h"

#include "optim/group_runtime.h"
#include "optim/group_step.h"
#include "optim/state_stacks.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace torchium::optim {

bool StackedOptimizer::is_ready(const std::string& needed_layout, const at::Tensor& param) const {
  auto* state = static_cast<MatrixParamState*>(find_state(param));
  return state != nullptr && state->layout_ == needed_layout && param.sizes() == state->sizes_ &&
         state->is_of(param);
}

bool StackedOptimizer::state_is_ready(const Options& options, const at::Tensor& param) const {
  return is_ready(layout(options), param);
}

bool StackedOptimizer::all_ready(size_t group, const std::vector<at::Tensor>& active) const {
  // Runs in every step: one layout for the parameters of a model.
  const std::string needed_layout = layout(param_groups_[group].options());
  return std::all_of(active.begin(), active.end(),
                     [&](const at::Tensor& param) { return is_ready(needed_layout, param); });
}

// Refuses state that was made for other options or another shape, if that makes a difference.
void StackedOptimizer::check_group_states(size_t group,
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
    bool fits = detail::slots_fit(init_stacks(options, {shape_alone}), *state);
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

void StackedOptimizer::init_group_states(size_t group, const std::vector<at::Tensor>& active) {
  const Options& options = param_groups_[group].options();
  if (all_ready(group, active)) {
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
      init_averages(options, param, *state);
    } else {
      state->convert_to(param);
    }
    params.push_back(param);
    states.push_back(state);
  }
  detail::move_into_stacks(init_stacks(options, params), states,
                           [&](size_t i) { return describe(params[i]); });
  for (const auto i : c10::irange(states.size())) {
    states[i]->layout_ = layout(options);
    states[i]->sizes_ = params[i].sizes().vec();
  }
  for (auto& [param, state] : created) {
    add_state(param, std::move(state));
  }
}

void StackedOptimizer::take_step(const ActiveParams& active) {
  for (const auto group : c10::irange(active.size())) {
    check_group_states(group, active[group]);
  }
  for (const auto group : c10::irange(active.size())) {
    init_group_states(group, active[group]);
  }
  for (const auto group : c10::irange(active.size())) {
    for (auto& [device, params] : detail::split_by_device(active[group])) {
      detail::GroupStep step = begin_call(group, std::move(params));
      step_group(param_groups_[group].options(), step);
      finish_step(group, step);
    }
  }
}

void StackedOptimizer::update_groups(const GroupUpdate& update) {
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
  for (const auto group : c10::irange(param_groups_.size())) {
    init_group_states(group, with_state[group]);
    for (auto& [device, on_device] : detail::split_by_device(std::move(with_state[group]))) {
      TORCH_CHECK(
          capturable(param_groups_[group].options()) || !torchium::detail::is_capturing(device),
          "update_preconditioners() cannot be captured in a CUDA graph: it reports failures to the "
          "host. Use Shampoo with capturable = true, and check_errors()");
      detail::GroupStep step = begin_call(group, std::move(on_device));
      update(param_groups_[group].options(), step);
      finish_update(group, step);
    }
  }
  read_reports(/*wait=*/false);
}

void StackedOptimizer::sync_learning_rates() {
  runtimes().for_each([&](detail::GroupRuntime& runtime) {
    if (runtime.group() < param_groups_.size()) {
      runtime.sync_learning_rate(param_groups_[runtime.group()].options().get_lr());
    }
  });
}

void StackedOptimizer::fit_loaded(const Options& options, const std::vector<at::Tensor>& params,
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
  detail::move_into_stacks(init_stacks(options, params), states,
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

bool MatrixParamState::is_of(const at::Tensor& param) {
  return SecondOrderParamState::is_of(param) &&
         (statistics().empty() || statistics().front().scalar_type() == detail::state_dtype(param));
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
