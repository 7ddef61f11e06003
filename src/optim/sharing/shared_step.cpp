// A step of SharedPlans, from the directions to the parameters.
#include "optim/blocked/elementwise.h"
#include "optim/core/found_inf_guard.h"
#include "optim/sharing/cuda/block_moves.h"
#include "optim/sharing/shared_plans.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <functional>

namespace torchium::optim::detail {

void SharedPlans::step(const LearningRates& lr, const at::Tensor& found_inf) {
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(device_);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (is_capturable_) {
    step_on_device(lr, found_inf);
    return;
  }
  TORCH_CHECK(!torchium::detail::is_capturing(device_),
              "step() with a process_group cannot be captured in a CUDA graph: the host reads in "
              "each step what the ranks have agreed on. Use Shampoo with capturable=True");
  const auto release = c10::make_scope_exit([&] {
    blocks_.abandon();
    release_gradients();
  });
  const PendingAgreement agreement = begin_agreement(lr, found_inf);
  const bool is_late = settles_late();
  StepFindings findings = is_late ? all_kept() : settle(agreement);
  if (kept_groups(findings) == 0) {
    return;
  }
  HeldError held;
  held.run([&] { finish_gradients(findings); });  // g <- +-g + wd p
  exchange_gradients(findings, held);
  stream_->begin();
  held.run([&] {
    const at::Tensor skipped = agreement.skipped();
    step_blocks(findings, is_late ? skipped : at::Tensor());  // 0 + d
  });
  stream_->end_stages(kStages + 1);
  if (is_late) {
    findings = settle_late(agreement);
    if (kept_groups(findings) == 0) {  // what has failed on this rank had no effect
      return;
    }
  } else {
    held.run([&] { take_block_failures(/*wait=*/false); });
  }
  stream_->run([&] { apply_all(findings, lr, {}, held); });  // p <- (1 - lr wd) p - lr d
  held.raise();
}

// All launch all of the step, whatever they agree on. The first one after bind() waits: what the
// ranks launch is the same only where their setups are.
void SharedPlans::step_on_device(const LearningRates& lr, const at::Tensor& found_inf) {
  check_not_broken();
  TORCH_CHECK(!is_new_ || !torchium::detail::is_capturing(device_),
              "step() cannot be captured yet: parameters or their state are new; run a step before "
              "the capture");
  const auto release = c10::make_scope_exit([&] {
    blocks_.abandon();
    release_gradients();
  });
  const PendingAgreement agreement = begin_agreement(lr, found_inf);
  StepFindings findings = all_kept();
  if (is_new_) {
    TORCH_CHECK(agreement.new_memory() != distributed::OnRanks::kSome,
                "parameters, gradients or state were replaced on some ranks of the process group "
                "alone; with capturable=True replace them on all ranks before the same step");
    findings.new_memory = settle(agreement).new_memory;
    is_new_ = false;
  }
  HeldError held;
  at::Tensor skipped;
  held.run([&] {
    skipped = agreement.skipped();
    agreement.keep(answer_);
    finish_gradients(findings);
  });
  exchange_gradients(findings, held);
  stream_->begin();
  held.run([&] { step_blocks(findings, skipped); });
  stream_->end_stages(kStages + 1);
  stream_->run([&] { apply_all(findings, lr, skipped, held); });
  if (!torchium::detail::is_capturing(device_)) {
    take_block_failures(/*wait=*/false);
  }
  held.raise();
}

// Phase after phase; one more stage sends what does not go to all ranks. `skipped`: of the groups,
// on the device; undefined: the host knows.
void SharedPlans::step_blocks(const StepFindings& findings, const at::Tensor& skipped) {
  TORCH_CHECK(blocks_.prepare(), "parameters, gradients or state changed during step()");
  TORCH_INTERNAL_ASSERT(std::ranges::all_of(parameters_, [&](const Parameter& p) {
    return !p.is_local || !steps(p, findings) || blocks_.defers(group_of_blocks(p));
  }));
  const at::Tensor minus_one = at::scalar_tensor(-1.0, at::kDouble);
  const auto found_inf = [&](size_t group) {
    const auto parameter_group = static_cast<int64_t>(group / (rules_->kinds() * kPhases));
    return skipped.defined() ? skipped.select(0, parameter_group) : at::Tensor();
  };
  const std::vector<KnownMagnitudes> known = known_magnitudes();
  // A stage has ended when the last group of its phase has ended it.
  size_t last = 0;
  for (const Parameter& p : parameters_) {
    if (p.stage > 0 && p.is_active) {
      last = std::max(last, group_of_blocks(p));
    }
  }
  for (size_t phase = 0; phase < kPhases; ++phase) {
    blocks_.step_groups([&](size_t group) { return group % kPhases == phase; },
                        [&](size_t, const BlockedPlan&) { return minus_one; }, found_inf,
                        [&](size_t group) {
                          const bool ends = phase == kLaterStages && group == last;
                          return SharedInputs{known[group], ends ? [&] { stream_->end_stage(); }
                                                                 : std::function<void()>()};
                        });
    stream_->end_stages(phase == kFirstStage ? 1 : kStages);
  }
  for (const auto& [dtype, exchange] : exchanges_) {
    send_updates(exchange, findings);
  }
}

// 1 if no rank holds an error, on this device; else throws if the host knows already. On other
// devices than the CPU nobody waits: 0 keeps all parameters as they are, and the next step throws.
at::Tensor SharedPlans::agree_on_error(const HeldError& held) {
  const int64_t own =
      held.is_set() ? distributed::failure_of_rank(ranks_, distributed::FailedPart::kWork) : 0;
  at::Tensor failed = at::full({1}, own, at::TensorOptions(device_).dtype(at::kLong));
  ranks_.all_reduce_max_(failed);
  if (device_.is_cpu()) {
    held.raise();
    distributed::check_failure(failed.item<int64_t>(), ranks_);
  } else {
    note_failure(failed);
  }
  return failed.eq(0).to(at::kDouble).view(at::IntArrayRef{});
}

// Until the ranks settle.
void SharedPlans::note_failure(const at::Tensor& failed) {
  if (failed_.defined()) {
    failed_.copy_(at::maximum(failed_, failed));
  } else {
    failed_ = failed;
  }
}

bool SharedPlans::is_kept(const StepFindings& findings, size_t group) const {
  return !findings.found_inf && findings.groups[group].unfit < 0;
}

size_t SharedPlans::kept_groups(const StepFindings& findings) const {
  size_t count = 0;
  for (size_t group = 0; group < options_.size(); ++group) {
    count += is_kept(findings, group) ? 1 : 0;
  }
  return count;
}

StepFindings SharedPlans::all_kept() const {
  StepFindings findings;
  findings.groups.resize(options_.size());
  return findings;
}

// Where a part lies in this rank's tensor.
std::optional<ElementRows> SharedPlans::rows_of_part(const Parameter& p,
                                                     const distributed::Part& part) const {
  return rows_of(p.shared->local_dims, part.local_on(ranks_.rank()), part.rectangle.sizes);
}

// Fills the directions that this rank sends to single others.
void SharedPlans::send_updates(const Exchange& exchange, const StepFindings& findings) const {
  for (const auto& [parameter, copy, values] : exchange.sent_directions) {
    if (steps(parameters_[parameter], findings)) {
      copy.copy_(values);
    }
  }
}

namespace {

at::Tensor in_dtype(const at::Tensor& values, at::ScalarType dtype) {
  return values.scalar_type() == dtype ? values : values.to(dtype);
}

}  // namespace

// The directions of own blocks for this rank's own elements, rounded as they travel: all replicas
// stay equal.
std::vector<SharedPlans::Update> SharedPlans::own_updates(const Exchange& exchange,
                                                          at::ScalarType dtype,
                                                          const StepFindings& findings) const {
  std::vector<Update> updates;
  for (const auto& [target, values] : exchange.own_directions) {
    const Parameter& p = parameters_[target.parameter];
    if (steps(p, findings)) {
      const at::Tensor travelling = in_dtype(values, exchange.updates->comm_dtype());
      updates.push_back({&target, in_dtype(travelling, dtype).contiguous()});
    }
  }
  return updates;
}

// What has come to all ranks.
std::vector<SharedPlans::Update> SharedPlans::gathered_updates(
    const Exchange& exchange, const std::vector<distributed::UpdateExchange::Update>& arrivals,
    at::ScalarType dtype, const StepFindings& findings) const {
  std::vector<Update> updates;
  for (const auto& [k, values] : arrivals) {
    const Target& target = exchange.gathered_targets[k];
    if (steps(parameters_[target.parameter], findings)) {
      updates.push_back({&target, in_dtype(values, dtype)});
    }
  }
  return updates;
}

// What has come to this rank.
std::vector<SharedPlans::Update> SharedPlans::sent_updates(
    const Exchange& exchange, const std::vector<distributed::PartExchange::Arrival>& arrivals,
    at::ScalarType dtype, const StepFindings& findings) const {
  std::vector<Update> updates;
  for (const auto& [transfer, values] : arrivals) {
    const Target& target = exchange.update_targets[transfer];
    if (steps(parameters_[target.parameter], findings)) {
      updates.push_back({&target, in_dtype(values, dtype)});
    }
  }
  return updates;
}

// p <- (1 - lr wd) p - lr d, for parts of blocks.
void SharedPlans::apply(const std::vector<Update>& updates, const std::vector<at::Tensor>& rates,
                        Copies& copies) const {
  std::vector<std::vector<TensorBlock>> by_kernels(options_.size());
  const FoundInfGuard open = FoundInfGuard::open();
  std::vector<StepScalar> lrs;
  for (const at::Tensor& rate : rates) {
    lrs.push_back(open.learning_rate(rate));
  }
  for (const auto& [target, values] : updates) {
    const Parameter& p = parameters_[target->parameter];
    at::Tensor param = p.param.tensor();
    if (!param.is_contiguous()) {
      param = copies.try_emplace(target->parameter, param.detach().contiguous()).first->second;
    }
    if (target->rows && has_block_kernel(param, values)) {
      by_kernels[p.group].push_back({param, *target->rows, values});
      continue;
    }
    at::Tensor elements = part_of_shard(param.detach(), *p.shared, *target->part,
                                        target->part->local_on(ranks_.rank()));
    const at::Tensor direction = values.view(elements.sizes());
    const UpdateRule rule{.decoupled_weight_decay = rules_->decoupled_decay(*options_[p.group])};
    if (elements.is_cpu() && !elements.is_contiguous()) {  // fused loops need one piece of memory
      at::Tensor copy = elements.contiguous();
      apply_update(rule, lrs[p.group], copy, direction, nullptr, open);
      elements.copy_(copy);
    } else {
      apply_update(rule, lrs[p.group], elements, direction, nullptr, open);
    }
  }
  for (size_t g = 0; g < by_kernels.size(); ++g) {
    move_by_kernels(by_kernels[g], rates[g], rules_->decoupled_decay(*options_[g]));
  }
}

// A rank whose parameters were replaced has new memory for others to read. If they have no new one,
// nobody reads any more.
void SharedPlans::share_memory(distributed::OnRanks new_memory) const {
  if (new_memory != distributed::OnRanks::kNone) {
    for (const auto& [dtype, exchange] : exchanges_) {
      exchange.gathered->share_memory(new_memory == distributed::OnRanks::kAll);
    }
  }
}

// `skipped`: of the groups, on the device; undefined: the host knows.
void SharedPlans::apply_all(const StepFindings& findings, const LearningRates& lr,
                            const at::Tensor& skipped, HeldError& held) {
  stream_->wait_for(0);
  const at::Tensor all_well = agree_on_error(held);
  share_memory(findings.new_memory);
  const bool has_directions = !held.is_set();
  std::vector<at::Tensor> taken, rates;  // 1 or 0, and learning rates, of the groups
  held.run([&] {
    for (size_t g = 0; g < options_.size(); ++g) {
      taken.push_back(skipped.defined() ? all_well * (1 - skipped[static_cast<int64_t>(g)])
                                        : all_well);
      const at::Tensor rate = lr(g, *plans_of_groups_[g]);
      rates.push_back(device_.is_cpu() ? rate : taken[g] * rate);
    }
  });
  Copies copies;
  for (size_t stage = 0; stage < kStages; ++stage) {
    stream_->wait_for(stage);
    for (const auto& [dtype, exchange] : exchanges_) {
      exchange.gathered->run(stage, [&, dtype = dtype](const auto& arrivals) {
        held.run(
            [&] { apply(gathered_updates(exchange, arrivals, dtype, findings), rates, copies); });
      });
    }
  }
  stream_->wait_for(kStages);
  for (const auto& [dtype, exchange] : exchanges_) {
    exchange.updates->run([&, dtype = dtype](const auto& arrivals) {
      held.run([&] { apply(sent_updates(exchange, arrivals, dtype, findings), rates, copies); });
    });
    held.run([&] { apply(own_updates(exchange, dtype, findings), rates, copies); });
  }
  held.run([&] { finish_blocks(findings, rates); });
  held.run([&] { finish_parameters(findings, copies, taken); });
  if (held.is_set() && has_directions) {  // the next step of all ranks raises too
    note_failure(
        at::full({1}, distributed::failure_of_rank(ranks_, distributed::FailedPart::kLastUpdate),
                 at::TensorOptions(device_).dtype(at::kLong)));
  }
}

// The updates of local blocks.
void SharedPlans::finish_blocks(const StepFindings& findings,
                                const std::vector<at::Tensor>& rates) {
  blocks_.finish_groups([&](size_t group, BlockedPlan& plan) {
    const size_t g = group / (rules_->kinds() * kPhases);
    if (is_kept(findings, g)) {
      plan.finish(rates[g], rules_->decoupled_decay(*options_[g]));
    }
  });
}

// taken: of the groups.
void SharedPlans::finish_parameters(const StepFindings& findings, const Copies& copies,
                                    const std::vector<at::Tensor>& taken) {
  for (const auto& [index, copy] : copies) {
    parameters_[index].param.tensor().detach().copy_(copy);
  }
  std::vector<std::vector<at::Tensor>> counts(options_.size());
  for (const Parameter& p : parameters_) {
    if (steps(p, findings)) {
      counts[p.group].push_back(p.state.step);
      p.param.tensor().unsafeGetTensorImpl()->bump_version();
    }
  }
  for (size_t g = 0; g < counts.size(); ++g) {  // t <- t + 1
    if (counts[g].empty()) {
      continue;
    }
    if (counts[g][0].is_cpu()) {
      FoundInfGuard::open().advance(counts[g]);
    } else {
      at::_foreach_add_(counts[g], taken[g]);
    }
  }
}

}  // namespace torchium::optim::detail
