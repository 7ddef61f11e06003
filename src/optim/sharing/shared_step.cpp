// A step of SharedPlans, from the gradients to the parameters, and its failures.
#include "optim/blocked/elementwise.h"
#include "optim/core/step_status.h"
#include "optim/sharing/cuda/block_moves.h"
#include "optim/sharing/shared_plans.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

// In a memory layout whose blocks are views.
at::Tensor block_in(const at::Tensor& tensor, const SharedBlocks& of, size_t block) {
  return block_of(tensor.detach().contiguous(), of, block);
}

}  // namespace

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

}  // namespace torchium::optim::detail
