// The gradients of a step of SharedPlans: examined, agreed on, and brought to the owners of blocks.
#include "optim/blocked/elementwise.h"
#include "optim/core/found_inf_guard.h"
#include "optim/core/step_status.h"
#include "optim/sharing/cuda/block_moves.h"
#include "optim/sharing/cuda/gradient_scan.h"
#include "optim/sharing/shared_plans.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Whether the step can read the gradient where it is.
bool SharedPlans::takes_as_it_is(const Sent& sent, const at::Tensor& grad) const {
  const auto& options = *options_[parameters_[sent.parameter].group];
  return !sent.strides.empty() && grad.is_contiguous() &&
         grad.scalar_type() == sent.block->tensor.scalar_type() && !rules_->maximize(options) &&
         rules_->l2_penalty(options) == 0.0;
}

// A block of the gradient where it is: one tensor for all steps, because a new one for each would
// take most of the time of the host.
void SharedPlans::point_to(Sent& sent, const at::Tensor& grad) const {
  const int64_t offset = grad.storage_offset() + sent.rows->offset;
  if (!sent.view.defined()) {
    sent.view = grad.as_strided(sent.part->rectangle.sizes, sent.strides, offset);
    return;
  }
  at::TensorImpl* view = sent.view.unsafeGetTensorImpl();
  view->set_storage_keep_dtype(grad.storage());
  view->set_storage_offset(offset);
}

// Takes the gradients that this rank gives, and copies them where it has to.
void SharedPlans::gather_gradients() {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a view of each block
  std::vector<TensorBlock> by_kernels;
  size_t parameter = parameters_.size();
  at::Tensor grad;  // in a memory layout whose blocks are views
  for (Sent& sent : sent_) {
    const Parameter& p = parameters_[sent.parameter];
    if (!p.is_active) {
      continue;
    }
    const at::Tensor& given = gradient_of(p.param.tensor());
    if (sent.parameter != parameter) {
      parameter = sent.parameter;
      grad = given.contiguous();
    }
    if (takes_as_it_is(sent, given)) {
      point_to(sent, given);
      sent.values = sent.view;
      continue;
    }
    if (!sent.memory.defined()) {
      sent.memory = at::empty_like(sent.block->tensor);
    }
    sent.values = sent.memory;
    if (sent.rows && has_block_kernel(grad, sent.memory)) {
      by_kernels.push_back({grad, *sent.rows, sent.memory});
    } else {
      sent.memory.copy_(
          part_of_shard(grad, *p.shared, *sent.part, sent.part->local_on(ranks_.rank())));
    }
  }
  gather_by_kernels(by_kernels);
}

// The elements of the parameter that belong to a gradient, contiguous.
at::Tensor SharedPlans::values_of(const Sent& sent) const {
  const Parameter& p = parameters_[sent.parameter];
  return part_of_shard(p.param.tensor().detach().contiguous(), *p.shared, *sent.part,
                       sent.part->local_on(ranks_.rank()))
      .contiguous();
}

// Each rank examines the gradients that it gives, by the limits of their parameters. On a GPU the
// steps of blocks whose whole gradients these are need not do so again.
void SharedPlans::examine_gradients(StepFindings& own, distributed::DeviceFindings& on_device) {
  std::vector<std::vector<Examined>> examined(options_.size());
  std::vector<std::pair<OwnBlock*, size_t>> whole;  // and their places
  size_t count = 0;
  for (const Sent& sent : sent_) {
    const Parameter& p = parameters_[sent.parameter];
    if (!p.is_active) {
      continue;
    }
    const GradientLimits limits =
        gradient_limits(p.shared->whole, rules_->l2_penalty(*options_[p.group]));
    auto& of_group = examined[p.group];
    of_group.push_back({sent.values, p.index, limits.gradient, p.state.step});
    if (limits.has_parameter) {
      of_group.push_back({values_of(sent), p.index, limits.parameter, p.state.step});
    } else if (sent.block != nullptr) {  // the penalty would be added
      whole.emplace_back(sent.block, count);
    }
    count += limits.has_parameter ? 2 : 1;
  }
  if (has_scan_kernels(device_)) {
    GradientScan scan = scan_by_kernels(examined, device_);
    on_device.unfit = std::move(scan.unfit);
    magnitudes_ = std::move(scan.largest);
    const auto* largest = reinterpret_cast<const unsigned*>(magnitudes_.const_data_ptr<int>());
    for (const auto& [block, place] : whole) {
      block->known = largest + place;
    }
    return;
  }
  const auto groups = static_cast<int64_t>(options_.size());
  at::Tensor status = at::zeros({groups, kStatusSize}, at::TensorOptions(device_).dtype(at::kLong));
  const at::Tensor unfit = status.select(1, kNonFiniteParameter).fill_(-1);
  for (int64_t g = 0; g < groups; ++g) {
    if (!examined[g].empty()) {
      at::Tensor of_group = status[g];
      FoundInfGuard::check(examined[g], of_group);
    }
    if (device_.is_cpu()) {
      own.groups[g].unfit = unfit[g].item<int64_t>();
    }
  }
  if (!device_.is_cpu()) {  // kMost - unfit, but 0 for -1
    const int64_t most = cuda_kernels::kMost;
    on_device.unfit = (most - unfit).bitwise_and_(most).to(at::kInt);
  }
}

// Of the own blocks in each group of blocks, in their order.
std::vector<KnownMagnitudes> SharedPlans::known_magnitudes() const {
  std::vector<KnownMagnitudes> known(group_of_blocks(options_.size(), 0, 0));
  for (const Parameter& p : parameters_) {
    for (const OwnBlock& own : p.own) {
      known[group_of_blocks(p)].push_back(own.known);
    }
  }
  return known;
}

// Of all that must be the same on all ranks.
uint64_t SharedPlans::hash_of_step(const LearningRates& lr) const {
  distributed::Hash hash;
  hash.add(static_cast<int64_t>(setup_));
  for (size_t g = 0; g < options_.size(); ++g) {
    const at::Tensor rate = lr(g, *plans_of_groups_[g]);
    hash.add(rate.is_cpu() ? rate.item<double>() : 0.0);
  }
  return hash.value();
}

bool SharedPlans::has_new_memory() const {
  return std::ranges::any_of(
      exchanges_, [](const auto& exchange) { return exchange.second.gathered->has_new_memory(); });
}

// What the host knows goes with what only the device does.
PendingAgreement SharedPlans::begin_agreement(const LearningRates& lr,
                                              const at::Tensor& found_inf) {
  StepFindings own;
  distributed::DeviceFindings on_device;
  std::optional<PendingAgreement> agreement;
  try {
    gather_gradients();
    // Of capturable steps a graph keeps the message: check_errors() reports failed roots.
    own.groups = is_capturable_ ? std::vector<GroupFindings>(options_.size()) : failures_;
    own.setup = hash_of_step(lr);
    own.new_memory = has_new_memory() ? distributed::OnRanks::kAll : distributed::OnRanks::kNone;
    if (is_capturable_) {  // the host would not hear that others differ
      own.setup = distributed::Hash()
                      .add(static_cast<int64_t>(own.setup))
                      .add(static_cast<int64_t>(own.new_memory))
                      .value();
    }
    for (const Parameter& p : parameters_) {
      own.mask.push_back(p.is_active ? 1 : 0);
    }
    examine_gradients(own, on_device);
    if (device_.is_cpu()) {
      own.failure = failed_.defined() ? failed_.item<int64_t>() : 0;
    } else {
      on_device.failure = failed_;
    }
    if (found_inf.defined() && (device_.is_cpu() || found_inf.is_cpu())) {
      own.found_inf = found_inf.item<double>() != 0.0;
    } else {
      on_device.found_inf = found_inf;
    }
    agreement.emplace(std::move(own), on_device, ranks_, device_, host_message_);
  } catch (...) {
    withdraw(device_);
    throw;
  }
  agreement->begin();
  return std::move(*agreement);
}

StepFindings SharedPlans::settle(const PendingAgreement& agreement) {
  StepFindings findings = agreement.settle(names_);  // an error leaves the others to the next step
  failures_.assign(options_.size(), {});
  failed_.reset();
  distributed::check_failure(findings.failure, ranks_);
  report(findings);
  return findings;
}

// After the blocks have taken or skipped the step on the device: reports to their plans which.
StepFindings SharedPlans::settle_late(const PendingAgreement& agreement) {
  HeldError held;
  StepFindings findings;
  held.run([&] { findings = settle(agreement); });
  take_block_failures(/*wait=*/held.is_set() || kept_groups(findings) < options_.size());
  held.raise();
  return findings;
}

// Whether the host may launch the steps of the blocks before it knows that they are taken: where no
// gradients travel before.
bool SharedPlans::settles_late() const {
  return !device_.is_cpu() && std::ranges::all_of(exchanges_, [](const auto& exchange) {
    return exchange.second.gradient_places.empty();
  });
}

// The step is done: the caller may free its gradients.
void SharedPlans::release_gradients() {
  give_gradients([](const Parameter& p) { return p.is_active; });
  for (Sent& sent : sent_) {
    sent.values.reset();
    if (sent.view.defined()) {
      sent.view.unsafeGetTensorImpl()->set_storage_keep_dtype(sent.block->tensor.storage());
    }
    if (sent.block != nullptr) {
      sent.block->known = nullptr;
    }
  }
  magnitudes_.reset();
}

void SharedPlans::finish_gradients(const StepFindings& findings) {
  give_gradients([&](const Parameter& p) { return steps(p, findings); });
  for (const Sent& sent : sent_) {
    const Parameter& p = parameters_[sent.parameter];
    if (!steps(p, findings)) {
      continue;
    }
    if (sent.block != nullptr) {
      sent.block->tensor.mutable_grad() = sent.values;
    }
    const auto& options = *options_[p.group];
    const GradientRule rule{.maximize = rules_->maximize(options),
                            .weight_decay = rules_->l2_penalty(options)};
    if (rule.maximize || rule.weight_decay != 0.0) {
      GradientElements elements;
      elements.param = values_of(sent).to(sent.values.scalar_type());
      elements.grad = elements.g = sent.values;
      gradient_pass(rule, elements, FoundInfGuard::open());
    }
    if (sent.target.defined()) {
      sent.target.copy_(sent.values);
    }
  }
}

// Brings to the own blocks the parts of their gradients that other ranks have.
void SharedPlans::exchange_gradients(const StepFindings& findings, HeldError& held) {
  for (const auto& [dtype, exchange] : exchanges_) {
    exchange.gradients->run([&](const auto& arrivals) {
      held.run([&] {
        for (const auto& [transfer, values] : arrivals) {
          if (steps(parameters_[exchange.gradient_places[transfer].parameter], findings)) {
            const at::Tensor& target = exchange.gradient_targets[transfer];
            target.copy_(values.view(target.sizes()));
          }
        }
      });
    });
  }
}

}  // namespace torchium::optim::detail
