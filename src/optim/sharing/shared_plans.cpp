#include "optim/sharing/shared_plans.h"

#include "optim/blocked/elementwise.h"
#include "optim/core/state_checks.h"
#include "optim/core/step_status.h"
#include "optim/sharing/cuda/block_moves.h"
#include "optim/sharing/shared_state.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

std::string name_of(const BlockedGroup& group, size_t g, size_t i) {
  return parameter_name(g, i, group.names.empty() ? "" : group.names[i], group.params[i]);
}

// In a memory layout whose blocks are views.
at::Tensor block_in(const at::Tensor& tensor, const SharedBlocks& of, size_t block) {
  return block_of(tensor.detach().contiguous(), of, block);
}

}  // namespace

SharedPlans::SharedPlans(std::string optimizer, MakePlan make_plan, MakePlan make_block_plan,
                         std::unique_ptr<SharingRules> rules, distributed::Communicator ranks,
                         SharingOptions options)
    : BlockedPlans(optimizer, std::move(make_plan)),
      rules_(std::move(rules)),
      ranks_(std::move(ranks)),
      sharing_(options),
      owners_(*rules_, ranks_.size()),
      blocks_(optimizer, std::move(make_block_plan)) {
  TORCH_CHECK_VALUE(sharing_.bucket_bytes >= 1,
                    "bucket_bytes must be an integer of at least 1, got ", sharing_.bucket_bytes);
  TORCH_CHECK_VALUE(sharing_.comm_dtype == at::kFloat || sharing_.comm_dtype == at::kBFloat16 ||
                        sharing_.comm_dtype == at::kHalf,
                    "comm_dtype must be float32, bfloat16 or float16, got ", sharing_.comm_dtype);
}

bool SharedPlans::Parameter::is_unchanged() const {
  return param.is_unchanged() &&
         std::ranges::all_of(tensors, [](const SeenTensor& each) { return each.is_unchanged(); });
}

// ---- binding

void SharedPlans::check(const std::vector<BlockedGroup>& groups, Active active) const {
  TORCH_CHECK_VALUE(groups.size() <= kMostSharedGroups,
                    "an optimizer with a process_group has at most ", kMostSharedGroups,
                    " parameter groups, got ", groups.size());
  std::optional<c10::Device> device;
  for (size_t g = 0; g < groups.size(); ++g) {
    rules_->check(*groups[g].options);
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const at::Tensor& param = groups[g].params[i];
      const std::string name = name_of(groups[g], g, i);
      check_parameter(param, name);
      TORCH_CHECK_VALUE(!device || *device == param.device(), name, " is on ", param.device(),
                        " and another on ", *device,
                        "; an optimizer with a process_group needs all parameters on one device");
      device = param.device();
      if (active == Active::kWithGradient && gradient_of(param).defined()) {
        check_gradient(gradient_of(param), param, name);
      }
    }
  }
}

// Parameters, the memory of their updates, and the blocks of this rank.
void SharedPlans::lay_out(const std::vector<BlockedGroup>& groups) {
  // Blocks stay the same tensors, by which blocks_ knows what their states were made for.
  std::map<std::pair<const at::TensorImpl*, size_t>, at::Tensor> before;
  for (const Parameter& p : parameters_) {
    for (const OwnBlock& own : p.own) {
      before[{p.param.tensor().unsafeGetTensorImpl(), own.block}] = own.tensor;
    }
  }
  options_.clear();
  plans_of_groups_.clear();
  parameters_.clear();
  exchanges_.clear();
  std::map<at::ScalarType, std::vector<distributed::UpdateExchange::Part>> parts;
  for (size_t g = 0; g < groups.size(); ++g) {
    options_.push_back(groups[g].options);
    plans_of_groups_.push_back(plan_of(groups[g]));
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const at::Tensor& param = groups[g].params[i];
      const SharedBlocks* shared = owners_.find(param);
      device_ = param.device();
      Parameter parameter{.group = g,
                          .index = i,
                          .name = name_of(groups[g], g, i),
                          .param = SeenTensor(param),
                          .state = {},
                          .tensors = {},
                          .shared = shared,
                          .kind = rules_->kind(*groups[g].options, param.sizes()),
                          .own = {}};
      for (size_t b = 0; shared != nullptr && b < shared->blocks.size(); ++b) {
        const at::ScalarType dtype = state_dtype(param);
        exchanges_[dtype].places.push_back({parameters_.size(), b});
        parts[dtype].push_back({shared->owners[b], shared->blocks[b].rectangle.numel()});
      }
      parameters_.push_back(std::move(parameter));
    }
  }
  for (auto& [dtype, exchange] : exchanges_) {
    exchange.updates = std::make_unique<distributed::UpdateExchange>(
        ranks_, parts[dtype], dtype, dtype == at::kDouble ? dtype : sharing_.comm_dtype,
        sharing_.bucket_bytes, device_);
    for (size_t k = 0; k < exchange.places.size(); ++k) {
      const auto [p, block] = exchange.places[k];
      const SharedBlocks& shared = *parameters_[p].shared;
      if (shared.owners[block] == ranks_.rank()) {
        at::Tensor tensor = exchange.updates->own(k).view(shared.blocks[block].rectangle.sizes);
        const auto found =
            before.find({parameters_[p].param.tensor().unsafeGetTensorImpl(), block});
        if (found != before.end() && found->second.device() == device_) {
          found->second.mutable_grad().reset();
          found->second.set_data(tensor);
          tensor = found->second;
        }
        parameters_[p].own.push_back({block, tensor, at::zeros_like(tensor)});
      }
    }
  }
}

// One group of each kind for each parameter group, without states.
std::vector<BlockedGroup> SharedPlans::groups_of_blocks() const {
  std::vector<BlockedGroup> groups;
  for (const auto& options : options_) {
    for (size_t kind = 0; kind < rules_->kinds(); ++kind) {
      groups.push_back({rules_->options_of_blocks(*options, kind), {}, {}, {}});
    }
  }
  for (const Parameter& parameter : parameters_) {
    BlockedGroup& group = groups[parameter.group * rules_->kinds() + parameter.kind];
    for (const OwnBlock& own : parameter.own) {
      group.params.push_back(own.tensor);
    }
  }
  return groups;
}

void SharedPlans::bind(std::vector<BlockedGroup>& groups, Active active) {
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check(groups, active);
  owners_.share_out(groups);
  lay_out(groups);
  std::vector<BlockedGroup> of_blocks = groups_of_blocks();
  // Where the states of each parameter's own blocks are.
  struct Range {
    size_t group, begin;
  };
  std::vector<Range> ranges;
  std::vector<ParameterState> shares;
  for (Parameter& p : parameters_) {
    const ParameterState& state = groups[p.group].states[p.index];
    const size_t group = p.group * rules_->kinds() + p.kind;
    BlockedGroup& target = of_blocks[group];
    ranges.push_back({group, target.states.size()});
    shares.emplace_back();
    p.is_active = p.shared != nullptr &&
                  (active == Active::kWithState ? !state.is_empty()
                                                : gradient_of(p.param.tensor()).defined());
    std::vector<ParameterState> states(p.own.size());
    if (!state.is_empty()) {
      shares.back() = share_of(state, *p.shared, ranks_.rank(), p.name);
      states = states_of_blocks(shares.back(), *p.shared, blocks_of(*p.shared, ranks_.rank()));
    }
    for (OwnBlock& own : p.own) {
      own.tensor.mutable_grad() = p.is_active ? own.gradient : at::Tensor();
    }
    std::ranges::move(states, std::back_inserter(target.states));
  }
  blocks_.bind(of_blocks, active);
  bool has_changed = false;
  for (size_t k = 0; k < parameters_.size(); ++k) {
    Parameter& p = parameters_[k];
    const ParameterState before = std::exchange(shares[k], {});
    if (p.shared == nullptr || (before.is_empty() && !p.is_active)) {
      continue;
    }
    std::vector<ParameterState*> states;
    for (size_t i = 0; i < p.own.size(); ++i) {
      states.push_back(&of_blocks[ranges[k].group].states[ranges[k].begin + i]);
    }
    const at::Tensor& param = p.param.tensor();
    shares[k].step = before.is_empty()
                         ? at::zeros({}, param.options().dtype(at::kDouble).requires_grad(false))
                         : before.step.to(device_, at::kDouble);
    has_changed |= join_states(states, *p.shared, blocks_of(*p.shared, ranks_.rank()), before,
                               plans_of_groups_[p.group]->planned_state(param), shares[k]);
  }
  if (has_changed) {
    blocks_.bind(of_blocks, active);
  }
  for (size_t k = 0; k < parameters_.size(); ++k) {
    Parameter& p = parameters_[k];
    p.state = shares[k];
    for (const auto& [key, tensor] : p.state.named()) {
      p.tensors.emplace_back(tensor);
    }
    groups[p.group].states[p.index] = p.state;
  }
  failures_.resize(groups.size());
  skips_in_a_row_.resize(groups.size(), 0);
  hash_setup();
}

void SharedPlans::hash_setup() {
  Hash hash;
  hash.add(static_cast<int64_t>(sharing_.comm_dtype)).add(sharing_.bucket_bytes);
  for (const auto& options : options_) {
    for (const auto& [name, value] : rules_->all_options(*options)) {
      hash.add(name).add(value);
    }
  }
  for (const Parameter& p : parameters_) {
    hash.add(static_cast<int64_t>(p.group))
        .add(static_cast<int64_t>(p.param.tensor().scalar_type()));
    for (const int64_t size : p.param.tensor().sizes()) {
      hash.add(size);
    }
    for (size_t b = 0; p.shared != nullptr && b < p.shared->owners.size(); ++b) {
      hash.add(p.shared->owners[b]);
    }
  }
  setup_ = hash.value();
}

bool SharedPlans::set_options(size_t group,
                              std::shared_ptr<const torch::optim::OptimizerOptions> options) {
  if (group >= options_.size()) {
    return false;
  }
  rules_->check(*options);
  options_[group] = options;
  bool fits = plans_of_groups_[group]->set_options(*options);
  for (size_t kind = 0; kind < rules_->kinds(); ++kind) {
    fits = blocks_.set_options(group * rules_->kinds() + kind,
                               rules_->options_of_blocks(*options, kind)) &&
           fits;
  }
  hash_setup();
  return fits;
}

bool SharedPlans::prepare() {
  for (Parameter& p : parameters_) {
    const at::Tensor& grad = gradient_of(p.param.tensor());
    p.is_active = grad.defined();
    if (p.is_active && (p.state.is_empty() || !p.is_unchanged() || !fits(grad, p.param.tensor()))) {
      return false;
    }
  }
  return true;
}

bool SharedPlans::has_all_states() const {
  return blocks_.has_all_states() &&
         std::ranges::all_of(parameters_, [](const Parameter& p) { return p.is_unchanged(); });
}

// ---- the step

void SharedPlans::step(const LearningRates& lr, const at::Tensor& found_inf) {
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(device_);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const StepFindings findings = agreed(lr, found_inf);
  report(findings);
  bool any_kept = false;
  for (size_t group = 0; group < options_.size(); ++group) {
    any_kept |= is_kept(findings, group);
  }
  if (!any_kept) {
    return;
  }
  finish_gradients(findings);  // g <- +-g + wd p
  for (const auto& [dtype, exchange] : exchanges_) {
    exchange.updates->clear_own();
  }
  TORCH_CHECK(blocks_.prepare(), "parameters, gradients or state changed during step()");
  const at::Tensor minus_one = at::scalar_tensor(-1.0, at::kDouble);
  blocks_.step([&](size_t, const BlockedPlan&) { return minus_one; }, {});  // 0 + d
  take_block_failures();
  apply_all(findings, lr);  // p <- (1 - lr wd) p - lr d
}

void SharedPlans::withdraw() {
  StepFindings findings;
  findings.has_error = true;
  agree(findings, ranks_, {});
}

// Copies the gradients of the own blocks.
void SharedPlans::gather_gradients() {
  for (Parameter& p : parameters_) {
    if (!p.is_active || p.own.empty()) {
      continue;
    }
    const at::Tensor grad = gradient_of(p.param.tensor()).detach().contiguous();
    for (OwnBlock& own : p.own) {
      own.gradient.copy_(block_of(grad, *p.shared, own.block));
    }
  }
}

// Each rank examines its own blocks, by the limits of their parameters.
StepFindings SharedPlans::examine() const {
  StepFindings findings;
  std::vector<std::vector<Examined>> examined(options_.size());
  for (const Parameter& p : parameters_) {
    findings.mask.push_back(p.is_active ? 1 : 0);
    const at::Tensor& param = p.param.tensor();
    const GradientLimits limits = gradient_limits(param, rules_->l2_penalty(*options_[p.group]));
    for (const OwnBlock& own : p.own) {
      if (!p.is_active) {
        continue;
      }
      auto& of_group = examined[p.group];
      of_group.push_back({own.gradient, p.index, limits.gradient, p.state.step});
      if (limits.has_parameter) {
        of_group.push_back({block_in(param, *p.shared, own.block).contiguous(), p.index,
                            limits.parameter, p.state.step});
      }
    }
  }
  for (size_t g = 0; g < options_.size(); ++g) {
    findings.groups.push_back(failures_[g]);
    if (examined[g].empty()) {
      continue;
    }
    at::Tensor status = at::zeros({kStatusSize}, at::TensorOptions(device_).dtype(at::kLong));
    // On a device the rank of a parameter among the examined ones is found, on a CPU its index.
    std::vector<size_t> params;
    for (Examined& each : examined[g]) {
      const size_t index = std::exchange(each.param, params.size());
      if (params.empty() || params.back() != index) {
        params.push_back(index);
      } else {
        --each.param;
      }
    }
    FoundInfGuard::check(examined[g], status);
    const auto first = status[kNonFiniteParameter].item<int64_t>();
    findings.groups[g].unfit = first < 0 ? -1 : static_cast<int64_t>(params[first]);
  }
  return findings;
}

StepFindings SharedPlans::agreed(const LearningRates& lr, const at::Tensor& found_inf) {
  StepFindings own;
  std::vector<std::string> names;
  try {
    gather_gradients();
    own = examine();
    Hash hash;
    hash.add(static_cast<int64_t>(setup_));
    for (size_t g = 0; g < options_.size(); ++g) {
      const at::Tensor rate = lr(g, *plans_of_groups_[g]);
      hash.add(rate.is_cpu() ? rate.item<double>() : 0.0);
    }
    own.setup = hash.value();
    own.found_inf = found_inf.defined() && found_inf.item<double>() != 0.0;
    for (const Parameter& p : parameters_) {
      names.push_back(p.name);
    }
  } catch (...) {
    withdraw();
    throw;
  }
  const StepFindings all = agree(own, ranks_, names);
  failures_.assign(options_.size(), {});
  return all;
}

bool SharedPlans::is_kept(const StepFindings& findings, size_t group) const {
  return !findings.found_inf && findings.groups[group].unfit < 0;
}

void SharedPlans::finish_gradients(const StepFindings& findings) {
  for (Parameter& p : parameters_) {
    const bool steps = p.is_active && is_kept(findings, p.group);
    const auto& options = *options_[p.group];
    const GradientRule rule{.maximize = rules_->maximize(options),
                            .weight_decay = rules_->l2_penalty(options)};
    for (OwnBlock& own : p.own) {
      own.tensor.mutable_grad() = steps ? own.gradient : at::Tensor();
      if (steps && (rule.maximize || rule.weight_decay != 0.0)) {
        const at::Tensor block = block_in(p.param.tensor(), *p.shared, own.block);
        GradientElements elements;
        elements.param = block.to(own.gradient.scalar_type()).contiguous();
        elements.grad = elements.g = own.gradient;
        gradient_pass(rule, elements, FoundInfGuard::open());
      }
    }
  }
}

// p <- (1 - lr wd) p - lr d, for the blocks of one bucket.
void SharedPlans::apply(const std::vector<distributed::UpdateExchange::Update>& updates,
                        const Exchange& exchange, const StepFindings& findings,
                        const std::vector<at::Tensor>& rates, Copies& copies) {
  std::vector<std::vector<BlockMove>> by_kernels(options_.size());
  for (const auto& [part, values] : updates) {
    const auto [index, block] = exchange.places[part];
    const Parameter& p = parameters_[index];
    if (!p.is_active || !is_kept(findings, p.group)) {
      continue;
    }
    at::Tensor param = p.param.tensor().detach();
    if (!param.is_contiguous()) {
      param = copies.try_emplace(index, param.contiguous()).first->second;
    }
    at::Tensor target = block_of(param, *p.shared, block);
    const BlockMove move{target, values.view(target.sizes())};
    if (has_move_kernel(move)) {
      by_kernels[p.group].push_back(move);
      continue;
    }
    const UpdateRule rule{.decoupled_weight_decay = rules_->decoupled_decay(*options_[p.group])};
    const FoundInfGuard open = FoundInfGuard::open();
    const StepScalar lr = open.learning_rate(rates[p.group]);
    if (param.is_cpu() && !target.is_contiguous()) {  // fused loops need one piece of memory
      at::Tensor copy = target.contiguous();
      apply_update(rule, lr, copy, move.direction, nullptr, open);
      target.copy_(copy);
    } else {
      apply_update(rule, lr, target, move.direction, nullptr, open);
    }
  }
  for (size_t g = 0; g < by_kernels.size(); ++g) {
    move_by_kernels(by_kernels[g], rates[g], rules_->decoupled_decay(*options_[g]));
  }
}

void SharedPlans::apply_all(const StepFindings& findings, const LearningRates& lr) {
  std::vector<at::Tensor> rates;
  for (size_t g = 0; g < options_.size(); ++g) {
    rates.push_back(lr(g, *plans_of_groups_[g]));
  }
  Copies copies;
  for (const auto& [dtype, exchange] : exchanges_) {
    exchange.updates->run(
        [&](const auto& updates) { apply(updates, exchange, findings, rates, copies); });
  }
  for (const auto& [index, copy] : copies) {
    parameters_[index].param.tensor().detach().copy_(copy);
  }
  std::vector<at::Tensor> steps;
  for (const Parameter& p : parameters_) {
    if (p.is_active && is_kept(findings, p.group)) {
      steps.push_back(p.state.step);
      p.param.tensor().unsafeGetTensorImpl()->bump_version();
    }
  }
  if (!steps.empty() && !steps[0].is_cpu()) {
    at::_foreach_add_(steps, 1);
  } else {
    FoundInfGuard::open().advance(steps);  // t <- t + 1
  }
}

// ---- failures

// All ranks hear of them in the next step.
void SharedPlans::take_block_failures() {
  while (const auto failure = blocks_.next_failure(/*wait=*/false)) {
    const auto& [group, report] = *failure;
    GroupFindings& found = failures_[group / rules_->kinds()];
    const int64_t count = report.entries[kConsecutiveRootFailures];
    for (const Parameter& p : parameters_) {
      for (const OwnBlock& own : p.own) {
        if (own.tensor.is_same(report.failed_parameter) && count > found.root_failures) {
          found.root_failures = count;
          found.failed = static_cast<int64_t>(p.index);
        }
      }
    }
  }
}

void SharedPlans::report(const StepFindings& findings) {
  const auto param = [&](size_t group, int64_t index) {
    const auto found = std::ranges::find_if(parameters_, [&](const Parameter& p) {
      return p.group == group && static_cast<int64_t>(p.index) == index;
    });
    return found == parameters_.end() ? at::Tensor() : found->param.tensor();
  };
  for (size_t g = 0; g < findings.groups.size(); ++g) {
    const GroupFindings& found = findings.groups[g];
    const bool is_unfit = !findings.found_inf && found.unfit >= 0;
    if (!findings.found_inf) {
      skips_in_a_row_[g] = is_unfit ? skips_in_a_row_[g] + 1 : 0;
    }
    if (!is_unfit && found.failed < 0) {
      continue;
    }
    StepReport report;
    if (is_unfit) {
      report.skipped = true;
      report.entries[kConsecutiveSkips] = skips_in_a_row_[g];
      report.non_finite_parameter = param(g, found.unfit);
    }
    if (found.failed >= 0) {
      report.entries[kConsecutiveRootFailures] = found.root_failures;
      report.failed_parameter = param(g, found.failed);
    }
    reports_.emplace_back(g, std::move(report));
  }
}

std::optional<std::pair<size_t, StepReport>> SharedPlans::next_failure(bool) {
  if (reports_.empty()) {
    return std::nullopt;
  }
  auto first = std::move(reports_.front());
  reports_.pop_front();
  return first;
}

// ---- reports and checkpoints

int64_t SharedPlans::host_steps(const at::Tensor& param) const {
  for (const Parameter& p : parameters_) {
    if (p.param.tensor().is_same(param) && !p.state.is_empty() && p.state.step.is_cpu()) {
      return static_cast<int64_t>(count_on_cpu(p.state.step));
    }
  }
  return -1;
}

std::vector<ParameterState> SharedPlans::whole_states(const BlockedGroup& group) const {
  const c10::NoGradGuard no_grad;
  std::vector<int64_t> presence;
  for (const ParameterState& state : group.states) {
    const auto of_param = presence_of(state);
    presence.insert(presence.end(), of_param.begin(), of_param.end());
  }
  presence = ranks_.maximum(presence);
  std::vector<ParameterState> states;
  const auto plan = plan_of(group);
  for (size_t i = 0; i < group.params.size(); ++i) {
    const SharedBlocks* shared = owners_.find(group.params[i]);
    if (shared == nullptr) {  // frozen, or just loaded and whole
      states.push_back(group.states[i]);
      continue;
    }
    const auto first = presence.begin() + static_cast<std::ptrdiff_t>(i * kPresence);
    states.push_back(whole_state(group.states[i], plan->planned_state(group.params[i]), *shared,
                                 {first, first + kPresence}, ranks_));
  }
  return states;
}

}  // namespace torchium::optim::detail
