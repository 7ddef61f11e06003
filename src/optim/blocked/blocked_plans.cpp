#include "optim/blocked/blocked_plans.h"

#include "optim/core/state_checks.h"
#include "optim/core/state_memory.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace torchium::optim::detail {

at::Tensor BlockedGroup::whole(size_t i) const {
  const distributed::ShardedShape* of = sharded_shape(i);
  return of == nullptr ? params[i] : params[i].new_empty({}).expand(of->shape);
}

std::string BlockedGroup::name_of(size_t g, size_t i) const {
  return parameter_name(g, i, given_name(i), whole(i));
}

std::string BlockedGroup::name_in_report(size_t g, size_t i) const {
  const std::string given = given_name(i);
  return given.empty() ? c10::str("parameter ", i, " of group ", g) : given;
}

// The plan of one group on one device before it is bound.
struct BlockedPlans::Draft {
  size_t group;
  c10::intrusive_ptr<BlockedPlan> plan;
  std::vector<StateEntry> entries;
  std::vector<size_t> positions;  // in the group
  std::vector<int64_t> host_steps;
  bool fits = true;

  bool has_active() const {
    return std::any_of(entries.begin(), entries.end(),
                       [](const StateEntry& entry) { return entry.is_active; });
  }
};

c10::intrusive_ptr<BlockedPlan> BlockedPlans::find_plan(size_t group, c10::Device device) const {
  const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const GroupPlan& each) {
    return each.group == group && each.plan->device() == device;
  });
  return found == plans_.end() ? nullptr : found->plan;
}

// Checks parameters and gradients, and sorts them by group and device.
std::vector<BlockedPlans::Draft> BlockedPlans::draft(const std::vector<BlockedGroup>& groups,
                                                     Active active) const {
  // Steps known to the host, by the tensor that counts them.
  std::unordered_map<const at::TensorImpl*, int64_t> known;
  for (const GroupPlan& each : plans_) {
    for (size_t i = 0; i < each.plan->size(); ++i) {
      known[each.plan->state(i).step.unsafeGetTensorImpl()] = each.plan->host_steps()[i];
    }
  }
  std::vector<Draft> drafts;
  for (size_t g = 0; g < groups.size(); ++g) {
    const size_t first = drafts.size();
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const at::Tensor& param = groups[g].params[i];
      const ParameterState& state = groups[g].states[i];
      const std::string name = groups[g].name_of(g, i);
      check_parameter(param, name);
      bool is_active = !state.is_empty();
      if (active == Active::kWithGradient) {
        const at::Tensor& grad = gradient_of(param);
        is_active = grad.defined();
        if (is_active) {
          check_gradient(grad, param, name);
        }
      }
      auto of_device =
          std::find_if(drafts.begin() + static_cast<std::ptrdiff_t>(first), drafts.end(),
                       [&](const Draft& each) { return each.plan->device() == param.device(); });
      if (of_device == drafts.end()) {
        auto plan = find_plan(g, param.device());
        TORCH_CHECK(plan != nullptr || !torchium::detail::is_capturing(param.device()),
                    "a CUDA graph cannot capture this call: it is the first one; run a step "
                    "before the capture");
        drafts.push_back({g, plan != nullptr ? plan : make_plan_(param.device()), {}, {}, {}});
        of_device = drafts.end() - 1;
      }
      const auto origin = origins_.find(param.unsafeGetTensorImpl());
      const auto count = known.find(state.step.unsafeGetTensorImpl());
      of_device->entries.push_back(
          {param, name, state, is_active, origin == origins_.end() ? nullptr : origin->second});
      of_device->positions.push_back(i);
      of_device->host_steps.push_back(state.is_empty()       ? 0
                                      : count == known.end() ? -1
                                                             : count->second);
    }
  }
  return drafts;
}

void BlockedPlans::check_first_step(const std::vector<Draft>& drafts) const {
  std::vector<at::Tensor> params;
  for (const Draft& each : drafts) {
    for (const StateEntry& entry : each.entries) {
      if (entry.is_active && !entry.state.is_empty()) {
        return;
      }
      if (entry.is_active) {
        params.push_back(entry.param);
      }
    }
  }
  check_first_gradients(params);
}

void BlockedPlans::bind(std::vector<BlockedGroup>& groups, Active active) {
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<Draft> drafts = draft(groups, active);
  if (active == Active::kWithGradient) {
    check_first_step(drafts);
  }
  for (Draft& each : drafts) {
    each.plan->set_options(*groups[each.group].options);
    try {
      each.plan->fit(each.entries);
    } catch (const c10::ValueError&) {
      if (each.has_active()) {
        throw;
      }
      each.fits = false;  // a step that needs the state raises
    }
  }
  // Nothing throws from here on.
  has_all_states_ = true;
  origins_.clear();
  std::vector<GroupPlan> plans;
  for (Draft& each : drafts) {
    adopt(each, groups[each.group]);
    plans.push_back({each.group, each.plan});
  }
  for (const GroupPlan& each : plans_) {  // may still have reports
    const bool is_in_use = std::any_of(plans.begin(), plans.end(), [&](const GroupPlan& other) {
      return other.plan == each.plan;
    });
    if (!is_in_use && each.group < groups.size()) {
      each.plan->bind({}, {}, {});
      plans.push_back(each);
    }
  }
  plans_ = std::move(plans);
}

// Hands the states of a draft to the group, and binds its plan.
void BlockedPlans::adopt(Draft& draft, BlockedGroup& group) {
  std::vector<at::Tensor> params;
  std::vector<ParameterState> states;
  std::vector<BlockUpdate> updates;
  for (size_t k = 0; k < draft.entries.size(); ++k) {
    StateEntry& entry = draft.entries[k];
    group.states[draft.positions[k]] = entry.state;
    if (entry.is_active) {
      entry.origin =
          std::make_shared<StateOrigin>(StateOrigin{group.options, entry.param.sizes().vec()});
    }
    if (entry.origin) {
      origins_[entry.param.unsafeGetTensorImpl()] = entry.origin;
    }
    // Incomplete state is left out: a step of its parameter then binds the plans again.
    const bool is_complete = draft.fits && draft.plan->is_complete(entry);
    has_all_states_ = has_all_states_ && (is_complete || entry.state.is_empty());
    states.push_back(is_complete ? entry.state : ParameterState());
    params.push_back(entry.param);
    updates.push_back(group.updates.empty() ? BlockUpdate() : group.updates[draft.positions[k]]);
  }
  draft.plan->set_updates(std::move(updates));
  draft.plan->bind(std::move(params), std::move(states), std::move(draft.host_steps));
}

void BlockedPlans::remember(const std::shared_ptr<const torch::optim::OptimizerOptions>& options,
                            const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    origins_[param.unsafeGetTensorImpl()] =
        std::make_shared<StateOrigin>(StateOrigin{options, param.sizes().vec()});
  }
}

bool BlockedPlans::set_options(size_t group,
                               std::shared_ptr<const torch::optim::OptimizerOptions> options) {
  bool fits = true;
  for (const GroupPlan& each : plans_) {
    if (each.group == group) {
      fits = each.plan->set_options(*options) && fits;
    }
  }
  return fits;
}

bool BlockedPlans::has_all_states() const {
  return has_all_states_ && std::all_of(plans_.begin(), plans_.end(), [](const GroupPlan& each) {
           return each.plan->is_unchanged();
         });
}

bool BlockedPlans::prepare() {
  return std::all_of(plans_.begin(), plans_.end(),
                     [](const GroupPlan& each) { return each.plan->prepare(); });
}

std::vector<BlockedPlan*> BlockedPlans::plans() const {
  std::vector<BlockedPlan*> plans;
  for (const GroupPlan& each : plans_) {
    plans.push_back(each.plan.get());
  }
  return plans;
}

void BlockedPlans::step(const LearningRates& lr, const at::Tensor& found_inf) {
  before_step();
  step_groups([](size_t) { return true; }, lr, [&](size_t) { return found_inf; },
              [](size_t) { return SharedInputs(); });
}

void BlockedPlans::step_groups(const std::function<bool(size_t group)>& includes,
                               const LearningRates& lr,
                               const std::function<at::Tensor(size_t group)>& found_inf,
                               const std::function<SharedInputs(size_t group)>& shared) {
  for (const GroupPlan& each : plans_) {
    if (includes(each.group)) {
      each.plan->step(lr(each.group, *each.plan), found_inf(each.group), shared(each.group));
    }
  }
}

bool BlockedPlans::defers(size_t group) const {
  return std::ranges::any_of(
      plans_, [&](const GroupPlan& each) { return each.group == group && each.plan->defers(); });
}

void BlockedPlans::finish_groups(
    const std::function<void(size_t group, BlockedPlan& plan)>& finish) {
  for (const GroupPlan& each : plans_) {
    if (each.plan->defers()) {
      finish(each.group, *each.plan);
    }
  }
}

void BlockedPlans::abandon() {
  for (const GroupPlan& each : plans_) {
    each.plan->abandon();
  }
}

void BlockedPlans::update_preconditioners() {
  for (const GroupPlan& each : plans_) {
    each.plan->update_preconditioners();
  }
}

std::optional<std::pair<size_t, StepReport>> BlockedPlans::next_failure(bool wait) {
  for (const GroupPlan& each : plans_) {
    if (auto report = each.plan->next_failure(wait)) {
      return std::pair(each.group, std::move(*report));
    }
  }
  return std::nullopt;
}

void BlockedPlans::request_reports() {
  for (const GroupPlan& each : plans_) {
    each.plan->request_report();
  }
}

c10::intrusive_ptr<BlockedPlan> BlockedPlans::plan_of(const BlockedGroup& group,
                                                      c10::Device device) const {
  auto plan = make_plan_(device);
  plan->set_options(*group.options);
  return plan;
}

std::vector<ParameterState> BlockedPlans::whole_states(size_t /*index*/,
                                                       const BlockedGroup& group) {
  const c10::NoGradGuard no_grad;
  const auto plan = plan_of(group);
  std::vector<ParameterState> states = group.states;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto origin = origins_.find(group.params[i].unsafeGetTensorImpl());
    if (origin != origins_.end() && !states[i].is_empty()) {
      StateEntry entry{group.params[i], {}, states[i], true, origin->second};
      plan->restart_averages(entry);
      states[i] = std::move(entry.state);
    }
  }
  return states;
}

std::vector<ParameterState> BlockedPlans::load(size_t index, const BlockedGroup& group,
                                               const std::vector<NamedTensors>& saved) const {
  const c10::NoGradGuard no_grad;
  std::vector<SavedState> with_state;
  for (size_t i = 0; i < saved.size(); ++i) {
    if (!saved[i].empty()) {
      with_state.push_back({group.whole(i), group.name_of(index, i), &saved[i]});
    }
  }
  std::vector<ParameterState> fitted = plan_of(group)->load(with_state);
  std::vector<ParameterState> loaded(saved.size());
  for (size_t i = 0, k = 0; i < saved.size(); ++i) {
    if (!saved[i].empty()) {
      loaded[i] = std::move(fitted[k++]);
    }
  }
  return loaded;
}

// The state, or the future state; empty for a parameter that will get none.
ParameterState BlockedPlans::state_or_plan(const BlockedPlan& plan, const BlockedGroup& group,
                                           size_t i) const {
  return !group.states[i].is_empty() || !group.params[i].requires_grad()
             ? group.states[i]
             : plan.planned_state(group.whole(i));
}

MemoryReport BlockedPlans::memory_report(const std::vector<BlockedGroup>& groups) const {
  MemoryReport report;
  report.groups.resize(groups.size());
  TensorBytes bytes;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto plan = plan_of(groups[g]);
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      add_parameter(report, g, groups[g].whole(i), groups[g].name_in_report(g, i),
                    state_or_plan(*plan, groups[g], i).named(), bytes);
    }
    report.groups[g] += memory(g, bytes);
  }
  return report;
}

ShampooReport BlockedPlans::report(const std::vector<BlockedGroup>& groups) const {
  ShampooReport report;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto plan = plan_of(groups[g]);
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const at::Tensor param = groups[g].whole(i);
      const ParameterState state = state_or_plan(*plan, groups[g], i);
      const BlockedPlan::Rule rule = state.is_empty()
                                         ? BlockedPlan::Rule{"none", "requires no gradient"}
                                         : plan->rule(param.sizes());
      report.parameters.push_back({.name = groups[g].name_in_report(g, i),
                                   .shape = param.sizes().vec(),
                                   .group = g,
                                   .rule = rule.name,
                                   .detail = rule.detail,
                                   .state_bytes = TensorBytes().add(state.named()).total()});
    }
  }
  return report;
}

int64_t BlockedPlans::host_steps(const at::Tensor& param) const {
  for (const GroupPlan& each : plans_) {
    for (size_t i = 0; i < each.plan->size(); ++i) {
      if (each.plan->param(i).is_same(param)) {
        return each.plan->host_steps()[i];
      }
    }
  }
  return -1;
}

GroupMemory BlockedPlans::memory(size_t group, TensorBytes& counted) const {
  GroupMemory memory;
  for (const GroupPlan& each : plans_) {
    if (each.group == group) {
      memory += each.plan->memory(counted);
    }
  }
  return memory;
}

int64_t BlockedPlans::graph_count() const {
  int64_t count = 0;
  for (const GroupPlan& each : plans_) {
    count += each.plan->graph_count();
  }
  return count;
}

}  // namespace torchium::optim::detail
