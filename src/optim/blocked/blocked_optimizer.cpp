#include "torchium/optim/blocked_optimizer.h"

#include "optim/blocked/blocked_plans.h"
#include "optim/core/device_learning_rate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <map>
#include <utility>

namespace torchium::optim {
namespace {

bool same_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
}

}  // namespace

struct BlockedOptimizer::Runtime {
  c10::intrusive_ptr<detail::BlockedPlans> plans;  // null: none yet
  std::vector<detail::BlockedGroup> bound;         // to the plans
  // By group and device.
  std::map<std::pair<size_t, std::string>, detail::DeviceLearningRate> learning_rates;
};

BlockedOptimizer::BlockedOptimizer(std::unique_ptr<Options> defaults)
    : SecondOrderOptimizer(std::move(defaults)), runtime_(std::make_unique<Runtime>()) {}

BlockedOptimizer::~BlockedOptimizer() = default;
BlockedOptimizer::BlockedOptimizer(BlockedOptimizer&&) noexcept = default;
BlockedOptimizer& BlockedOptimizer::operator=(BlockedOptimizer&&) noexcept = default;

detail::BlockedPlans& BlockedOptimizer::plans() const {
  refuse_moved_from();
  if (runtime_->plans == nullptr) {
    runtime_->plans = make_plans();
  }
  return *runtime_->plans;
}

detail::BlockedGroup BlockedOptimizer::group_of(size_t group, const Options& options) const {
  detail::BlockedGroup result{options.clone(), param_groups_[group].params(), {}, {}};
  for (const auto& param : result.params) {
    const std::string name = name_in_model(param);
    if (!name.empty()) {
      result.names.resize(result.params.size());
      result.names[&param - result.params.data()] = name;
    }
    const SecondOrderParamState* state = find_state(param);
    result.states.emplace_back(state != nullptr ? detail::ParameterState(state->tensors())
                                                : detail::ParameterState());
  }
  return result;
}

std::vector<detail::BlockedGroup> BlockedOptimizer::groups() const {
  refuse_moved_from();
  std::vector<detail::BlockedGroup> groups;
  for (const auto group : c10::irange(param_groups_.size())) {
    groups.push_back(group_of(group, param_groups_[group].options()));
  }
  return groups;
}

MemoryReport BlockedOptimizer::memory_report() const { return plans().memory_report(groups()); }

// Whether the plans are bound to the current groups and state; passes changed options on.
bool BlockedOptimizer::is_bound() {
  const auto& bound = runtime_->bound;
  if (bound.size() != param_groups_.size()) {
    return false;
  }
  for (const auto group : c10::irange(bound.size())) {
    const auto& params = param_groups_[group].params();
    if (!same_tensors(params, bound[group].params)) {
      return false;
    }
    for (const auto i : c10::irange(params.size())) {
      const auto* state = static_cast<const MatrixParamState*>(find_state(params[i]));
      const detail::ParameterState& tensors = bound[group].states[i];
      if (state == nullptr ? !tensors.is_empty() : !state->consists_of(tensors)) {
        return false;
      }
    }
  }
  bool fits = true;
  for (const auto group : c10::irange(bound.size())) {
    fits = adopt_options(group) && fits;
  }
  return fits;
}

// False if the state has to follow the options.
bool BlockedOptimizer::adopt_options(size_t group) {
  const Options& options = param_groups_[group].options();
  detail::BlockedGroup& bound = runtime_->bound[group];
  detail::check_learning_rate(options.get_lr());
  const OwnOptions& own = own_options(options);
  if (own.equals_but_lr(*bound.options)) {
    return true;
  }
  own.check();
  bound.options = options.clone();
  return plans().set_options(group, bound.options);
}

void BlockedOptimizer::bind(bool all_with_state) {
  using Active = detail::BlockedPlans::Active;
  runtime_->bound.clear();  // until all is done
  for (const auto& group : param_groups_) {
    own_options(group.options()).check();
  }
  auto bound = groups();
  plans().bind(bound, all_with_state ? Active::kWithState : Active::kWithGradient);
  for (const auto& group : bound) {
    for (const auto i : c10::irange(group.params.size())) {
      if (group.states[i].is_empty()) {
        continue;
      }
      auto& state = state_[group.params[i].unsafeGetTensorImpl()];
      if (state == nullptr) {
        state = make_empty_state();
      }
      static_cast<MatrixParamState&>(*state).assign(group.states[i]);
    }
  }
  runtime_->bound = std::move(bound);
}

void BlockedOptimizer::withdraw() {
  for (const auto& group : param_groups_) {
    if (!group.params().empty()) {
      plans().withdraw(group.params().front().device());
      return;
    }
  }
}

void BlockedOptimizer::take_step() {
  try {
    if (!is_bound() || !plans().prepare()) {
      bind(/*all_with_state=*/false);
      TORCH_CHECK(plans().prepare(), "parameters, gradients or state changed during step()");
    }
  } catch (...) {
    withdraw();
    throw;
  }
  const auto learning_rate = [this](size_t group, const detail::BlockedPlan& plan) {
    const c10::Device device = plan.device();
    return runtime_->learning_rates[{group, device.str()}].of_step(
        param_groups_[group].options().get_lr(), device, !plan.host_decides());
  };
  plans().step(learning_rate, /*found_inf=*/{});
}

void BlockedOptimizer::renew_all_roots() {
  refuse_moved_from();
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  read_reports(/*wait=*/false);
  if (!is_bound() || !plans().has_all_states()) {
    bind(/*all_with_state=*/true);
  }
  plans().update_preconditioners();
  read_reports(/*wait=*/false);
}

void BlockedOptimizer::read_reports(bool wait) {
  if (wait) {
    plans().request_reports();
  }
  while (const auto failure = plans().next_failure(wait)) {
    raise_failure(failure->first, failure->second);
  }
}

void BlockedOptimizer::forget_derived() { *runtime_ = {}; }

void BlockedOptimizer::after_load() {
  for (const auto& group : groups()) {
    std::vector<at::Tensor> with_state;
    for (const auto i : c10::irange(group.params.size())) {
      if (!group.states[i].is_empty()) {
        with_state.push_back(group.params[i]);
      }
    }
    plans().remember(group.options, with_state);
  }
}

void BlockedOptimizer::sync_learning_rates() {
  refuse_moved_from();
  for (const auto& group : param_groups_) {
    detail::check_learning_rate(group.options().get_lr());
  }
  for (auto& [place, learning_rate] : runtime_->learning_rates) {
    if (place.first < param_groups_.size()) {
      learning_rate.sync(param_groups_[place.first].options().get_lr());
    }
  }
}

std::optional<BlockedOptimizer::StateMap> BlockedOptimizer::whole_state() const {
  StateMap whole;
  const std::vector<detail::BlockedGroup> all_groups = groups();
  plans().agree_on_states(all_groups, /*as_shares=*/false);
  for (const auto group : c10::irange(param_groups_.size())) {
    const auto states = plans().whole_states(group, all_groups[group]);
    for (const auto i : c10::irange(states.size())) {
      if (!states[i].is_empty()) {
        auto state = make_empty_state();
        static_cast<MatrixParamState&>(*state).assign(states[i]);
        whole[param_groups_[group].params()[i].unsafeGetTensorImpl()] = std::move(state);
      }
    }
  }
  return whole;
}

BlockedOptimizer::StateList BlockedOptimizer::fit_states(size_t group, const Options& options,
                                                         const StateList& loaded) const {
  std::vector<detail::NamedTensors> saved;
  for (const auto& state : loaded) {
    saved.push_back(state != nullptr ? state->tensors() : detail::NamedTensors());
  }
  const auto states = plans().load(group, group_of(group, options), saved);
  StateList fitted(loaded.size());
  for (const auto i : c10::irange(states.size())) {
    if (!states[i].is_empty()) {
      fitted[i] = make_empty_state();
      static_cast<MatrixParamState&>(*fitted[i]).assign(states[i]);
    }
  }
  return fitted;
}

std::vector<SecondOrderParamState::NamedList> MatrixParamState::lists() {
  return {{"statistics", &statistics()}, {"roots", &roots()}, {"root_failures", &root_failures()}};
}

bool MatrixParamState::consists_of(const detail::ParameterState& tensors) const {
  return step().is_same(tensors.step) && same_tensors(statistics(), tensors.statistics) &&
         same_tensors(roots(), tensors.roots) &&
         same_tensors(root_failures(), tensors.root_failures);
}

void MatrixParamState::assign(const detail::ParameterState& tensors) {
  const detail::NamedTensors named = tensors.named();
  for (const auto& [key, member] : members()) {
    const at::Tensor* found = detail::find_tensor(named, key);
    *member = found == nullptr ? at::Tensor() : *found;
  }
  statistics(tensors.statistics).roots(tensors.roots).root_failures(tensors.root_failures);
}

}  // namespace torchium::optim
