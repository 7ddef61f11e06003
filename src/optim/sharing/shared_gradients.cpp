// The gradients of a step of SharedPlans: examined, agreed on, and brought to the owners of blocks.
#include "optim/blocked/elementwise.h"
#include "optim/core/found_inf_guard.h"
#include "optim/core/step_status.h"
#include "optim/sharing/shared_plans.h"

#include <ATen/ATen.h>

#include <map>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Copies the gradients that this rank gives, by few launches where they lie in one piece.
void SharedPlans::gather_gradients() {
  struct CopyLists {
    std::vector<at::Tensor> targets, sources;
  };
  std::map<at::ScalarType, CopyLists> in_one_piece;  // _foreach_copy_() takes targets of one dtype
  size_t parameter = parameters_.size();
  at::Tensor grad;  // in a memory layout whose blocks are views
  for (const Sent& sent : sent_) {
    const Parameter& p = parameters_[sent.parameter];
    if (!p.is_active) {
      continue;
    }
    const at::Tensor& given = gradient_of(p.param.tensor());
    if (sent.parameter != parameter) {
      parameter = sent.parameter;
      grad = given.detach().contiguous();
    }
    const at::Tensor source =
        part_of_shard(grad, *p.shared, *sent.part, sent.part->local_on(ranks_.rank()));
    if (given.is_contiguous() && source.is_contiguous() && source.numel() > 0) {
      CopyLists& copies = in_one_piece[sent.values.scalar_type()];
      copies.targets.push_back(sent.values);
      copies.sources.push_back(source);
    } else {
      sent.values.copy_(source);
    }
  }
  for (auto& [dtype, copies] : in_one_piece) {
    at::_foreach_copy_(copies.targets, copies.sources);
  }
}

// The elements of the parameter that belong to a gradient, contiguous.
at::Tensor SharedPlans::values_of(const Sent& sent) const {
  const Parameter& p = parameters_[sent.parameter];
  return part_of_shard(p.param.tensor().detach().contiguous(), *p.shared, *sent.part,
                       sent.part->local_on(ranks_.rank()))
      .contiguous();
}

// Each rank examines the gradients that it gives, by the limits of their parameters.
StepFindings SharedPlans::examine() const {
  StepFindings findings;
  std::vector<std::vector<Examined>> examined(options_.size());
  for (const Parameter& p : parameters_) {
    findings.mask.push_back(p.is_active ? 1 : 0);
  }
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
    }
  }
  const auto groups = static_cast<int64_t>(options_.size());
  at::Tensor status = at::zeros({groups, kStatusSize}, at::TensorOptions(device_).dtype(at::kLong));
  status.select(1, kNonFiniteParameter).fill_(-1);
  for (int64_t g = 0; g < groups; ++g) {
    if (!examined[g].empty()) {
      at::Tensor of_group = status[g];
      FoundInfGuard::check(examined[g], of_group);
    }
  }
  const at::Tensor found = status.select(1, kNonFiniteParameter).cpu();
  for (int64_t g = 0; g < groups; ++g) {
    findings.groups.push_back(failures_[g]);
    findings.groups[g].unfit = found[g].item<int64_t>();
  }
  return findings;
}

StepFindings SharedPlans::agreed(const LearningRates& lr, const at::Tensor& found_inf) {
  StepFindings own;
  std::vector<std::string> names;
  try {
    gather_gradients();
    own = examine();
    if (failed_.defined()) {  // the host has just waited for what comes after it
      check_last_step(std::exchange(failed_, {}));
    }
    distributed::Hash hash;
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

void SharedPlans::finish_gradients(const StepFindings& findings) {
  give_gradients([&](const Parameter& p) { return steps(p, findings); });
  for (const Sent& sent : sent_) {
    const Parameter& p = parameters_[sent.parameter];
    if (!steps(p, findings)) {
      continue;
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
          const PartPlace& place = exchange.gradient_places[transfer];
          const Parameter& p = parameters_[place.parameter];
          if (steps(p, findings)) {
            const distributed::Part& part = part_at(place);
            part_of_block(own_block(place.parameter, place.block).gradient,
                          p.shared->blocks[place.block], part)
                .copy_(values.view(part.rectangle.sizes));
          }
        }
      });
    });
  }
}

}  // namespace torchium::optim::detail
