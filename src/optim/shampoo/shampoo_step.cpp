#include "optim/shampoo/shampoo_step.h"

#include "linalg/products/batched_products.h"
#include "optim/blocked/preconditioner.h"
#include "optim/core/argument_checks.h"
#include "optim/shampoo/cuda/shampoo_kernels.h"
#include "optim/shampoo/shampoo_rules.h"
#include "support/phase.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

namespace torchium::optim::detail {
namespace {

StepRule step_rule(const ShampooOptions& o) {
  return {.beta1 = beta1(o) > 0.0 ? beta1(o) : 1.0,
          .moment_beta = o.grafting() == "adam" ? moment_beta(o) : 1.0,
          .beta2 = beta2(o),
          .start = static_cast<double>(o.start_preconditioning_step()),
          .weight_decay = l2_penalty(o)};
}

Schedule make_schedule(const ShampooOptions& o, const StateList& states,
                       at::IntArrayRef host_steps) {
  Schedule schedule;
  const bool host_knows = !o.capturable() || states[0].step.is_cpu();
  for (size_t i = 0; i < states.size(); ++i) {
    const int64_t t = host_knows ? step_on_host(states[i].step, host_steps, i) : kLateStep;
    const bool due =
        !o.capturable() && root_is_due(t, o.start_preconditioning_step(), o.update_freq());
    schedule.due_steps.push_back(due ? t : 0);
    schedule.started.push_back(t >= o.start_preconditioning_step());
    schedule.any_root_due |= due;
  }
  return schedule;
}

}  // namespace

ShampooStep::ShampooStep(const ShampooOptions& options, Role role, std::vector<at::Tensor> params,
                         StateList states, std::vector<BlockUpdate> updates, at::Tensor status)
    : options_(options),
      group_{role, std::move(params), std::move(states), {}, {}, std::move(updates)},
      status_(std::move(status)) {
  group_.blockings = make_blockings(options, group_.params, role);
  for (size_t i = 0; i < group_.params.size(); ++i) {
    group_.rules.push_back(parameter_rule(options, group_.blockings[i].dims));
    if (options.momentum() == 0.0) {
      group_.states[i].momentum_buffer.reset();  // stays in the state, for a later momentum
    }
  }
  make_subsets();
}

void ShampooStep::make_subsets() {
  prologue_ = StepPrologue::make(group_.params, group_.states, status_, l2_penalty(options_));
  std::vector<size_t> by_kernels, eager;
  for (size_t i = 0; i < group_.params.size(); ++i) {
    (has_shampoo_kernels(group_, i) ? by_kernels : eager).push_back(i);
  }
  batches_ = find_batches(group_.blockings, group_.states, by_kernels);
  const size_t count = batches_.size();
  std::ranges::move(find_batches(group_.blockings, group_.states, eager),
                    std::back_inserter(batches_));
  const std::span<MatrixBatch> all(batches_);
  all_by_kernels_ = eager.empty();
  group_.defers = all_by_kernels_ && std::ranges::all_of(by_kernels, [&](size_t i) {
                    return can_update_in_place(group_, i);
                  });
  if (!by_kernels.empty()) {
    subsets_.push_back(
        make_shampoo_kernels(options_, group_, by_kernels, all.first(count), *prologue_));
  }
  if (!eager.empty()) {
    subsets_.push_back(make_eager_subset(group_, std::move(eager), all.subspan(count)));
  }
}

void ShampooStep::run(const at::Tensor& lr, at::IntArrayRef host_steps,
                      const at::Tensor& found_inf) {
  auto end = c10::make_scope_exit([&] { end_subsets(); });
  {
    const torchium::detail::Phase phase("torchium::elementwise");
    if (!prologue_->run(step_rule(options_), found_inf)) {  // t <- t + 1, unless it is skipped
      return;
    }
  }
  const Schedule schedule = make_schedule(options_, group_.states, host_steps);
  const ShampooRun run{options_, lr, grads_, schedule, *prologue_, decoupled_decay(options_)};
  const auto each = [&](const char* name, auto part, auto... stage) {
    const torchium::detail::Phase phase(name);
    for (const auto& subset : subsets_) {
      (subset.get()->*part)(run, stage...);
    }
  };

  each("torchium::elementwise", &ShampooSubset::moments);  // m <- b1 m + (1 - b1) g; v, a
  const auto update_statistics = [&] {                     // L_i <- b2 L_i + (1 - b2) g_i g_i^T
    each("torchium::statistics", &ShampooSubset::statistics);
  };
  // Directions that others wait for travel while the statistics are updated, unless these come
  // first because the roots need them.
  const bool statistics_last = end_stage_ && !schedule.any_root_due;
  if (!statistics_last) {
    update_statistics();
  }
  if (schedule.any_root_due) {
    renew_roots(schedule);  // R_i <- (L_i / c + eps I)^(-1/(2k))
  }
  for (size_t stage = 0; stage < group_.stage_count(); ++stage) {
    each("torchium::precondition", &ShampooSubset::precondition, stage);  // d <- m x_1 R_1 ... R_k
    if (!group_.defers) {
      each("torchium::elementwise", &ShampooSubset::apply, stage);  // p <- p - lr |f| / |d| d
    }
    if (end_stage_) {
      end_stage_();
    }
  }
  if (statistics_last) {
    update_statistics();
  }
  if (group_.defers) {
    end.release();
  }
}

void ShampooStep::end_subsets() {
  for (const auto& subset : subsets_) {
    subset->end();
  }
}

void ShampooStep::finish(const at::Tensor& lr, double decoupled_weight_decay) {
  const torchium::detail::Phase phase("torchium::elementwise");
  const Schedule schedule;
  const ShampooRun run{options_, lr, grads_, schedule, *prologue_, decoupled_weight_decay};
  for (const auto& subset : subsets_) {
    for (size_t stage = 0; stage < group_.stage_count(); ++stage) {
      subset->apply(run, stage);
    }
  }
}

void ShampooStep::renew_roots(const Schedule& schedule) {
  const torchium::detail::Phase phase("torchium::roots");
  std::vector<StepScalar> c;
  for (size_t i = 0; i < group_.params.size(); ++i) {
    c.push_back(prologue_->correction(Average::kStatistics, i));
  }
  update_roots(batches_, root_rule(options_), schedule.due_steps, c, prologue_->guard());
  record_root_failures(batches_, status_);
}

bool ShampooStep::kernels_renew_roots() const {
  return std::ranges::all_of(batches_, [&](const MatrixBatch& batch) {
    return renews_on_device(batch, root_rule(options_));
  });
}

std::optional<GraphKey> ShampooStep::graph_key(at::IntArrayRef host_steps) const {
  if (!all_by_kernels_) {
    return std::nullopt;
  }
  size_t due = 0;  // parameters with a root that is due
  bool has_last_exponent = true;
  for (const int64_t before : host_steps) {  // none: a capturable step leaves the roots alone
    const int64_t t = before + 1;
    if (t < options_.start_preconditioning_step()) {
      return std::nullopt;
    }
    if (root_is_due(t, options_.start_preconditioning_step(), options_.update_freq())) {
      ++due;
      has_last_exponent &= t >= options_.exponent_warmup();
    }
  }
  if (due != 0 && !(due == host_steps.size() && has_last_exponent && kernels_renew_roots())) {
    return std::nullopt;
  }
  GraphKey key{static_cast<uint8_t>(linalg::detail::matmul_precision(options_.matmul_precision())),
               static_cast<uint8_t>(due != 0)};
  prologue_->add_to(key);
  return key;
}

}  // namespace torchium::optim::detail
