#include "optim/blocked/elementwise.h"
#include "optim/blocked/grafting.h"
#include "optim/blocked/preconditioner.h"
#include "optim/core/found_inf_guard.h"
#include "optim/shampoo/shampoo_subset.h"

#include <ATen/ATen.h>

#include <utility>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

class EagerSubset : public ShampooSubset {
 public:
  EagerSubset(const ShampooGroup& group, std::vector<size_t> members,
              std::span<MatrixBatch> batches)
      : group_(group), members_(std::move(members)), batches_(batches) {}

  void moments(const ShampooRun& run) override;
  void statistics(const ShampooRun& run) override;
  void precondition(const ShampooRun& run, size_t stage) override;
  void apply(const ShampooRun& run, size_t stage) override;
  void end() override { step_ = {}; }

 private:
  // Of one step. Symbols as in elementwise.h; blocks: one tensor per batch, undefined if none is
  // set aside.
  struct Step {
    FoundInfGuard guard = FoundInfGuard::open();
    Tensors g, m, f, d;  // one per parameter of the group
    Tensors g_blocks, m_blocks, f_blocks;
  };

  void set_aside(const ShampooOptions& o);
  GradientElements elements(const ShampooRun& run, size_t i) const;
  at::Tensor direction(const ShampooRun& run, size_t i) const;
  at::Tensor packed(size_t b, const Tensors& tensors, const Tensors& blocks) const {
    return pack(batches_[b], group_.blockings, tensors, blocks[b]);
  }

  const ShampooGroup& group_;
  std::vector<size_t> members_;
  std::span<MatrixBatch> batches_;
  Step step_;
};

GradientRule gradient_rule(const ShampooOptions& o) {
  return {.maximize = o.maximize(),
          .weight_decay = l2_penalty(o),
          .beta1 = beta1(o),
          .moment_beta = moment_beta(o),
          .grafting_eps = o.grafting_eps(),
          .diagonal_beta = beta2(o),
          .diagonal_eps = o.eps()};
}

void EagerSubset::set_aside(const ShampooOptions& o) {
  const size_t count = group_.params.size();
  step_.g = step_.m = step_.f = step_.d = Tensors(count);
  for (const MatrixBatch& batch : batches_) {
    const auto blocks = [&](bool needed, Tensors& tensors) {
      return needed ? set_aside_blocks(batch, group_.blockings, group_.params, tensors)
                    : at::Tensor();
    };
    step_.g_blocks.push_back(blocks(true, step_.g));
    step_.m_blocks.push_back(blocks(beta1(o) > 0.0, step_.m));
    step_.f_blocks.push_back(blocks(uses_second_moment(o), step_.f));
  }
}

GradientElements EagerSubset::elements(const ShampooRun& run, size_t i) const {
  const ParameterState& state = group_.states[i];
  const auto correction = [&](const at::Tensor& moment, Average average) {
    return moment.defined() ? run.prologue.correction(average, i) : StepScalar();
  };
  const at::Tensor& v = state.grafting_second_moment;
  return {.param = group_.params[i],
          .grad = run.grads[i],
          .exp_avg = state.exp_avg,
          .moment = v,
          .diagonal = state.diagonal,
          .exp_avg_correction = correction(state.exp_avg, Average::kGradient),
          .moment_correction = correction(v, Average::kSecondMoment),
          .diagonal_correction = correction(state.diagonal, Average::kStatistics),
          .g = step_.g[i],
          .m = step_.m[i],
          .f = step_.f[i],
          .d = {}};
}

// apply() does the whole step of parameters with the grafted rule, in one pass.
void EagerSubset::moments(const ShampooRun& run) {
  const GradientRule rule = gradient_rule(run.options);
  step_.guard = run.prologue.guard();
  set_aside(run.options);
  for (const size_t i : members_) {
    if (group_.rules[i] == ParameterRule::kGrafted) {
      continue;
    }
    GradientElements e = elements(run, i);
    gradient_pass(rule, e, step_.guard);
    step_.g[i] = e.g;
    step_.m[i] = e.m;
    step_.f[i] = e.f.defined() ? e.f : e.m;
    step_.d[i] = e.d;
    if (e.d.defined() && run.options.grafting().has_value()) {
      step_.d[i] = graft_diagonal(e.d, step_.f[i], run.options.block_size());
    }
  }
  for (size_t b = 0; b < batches_.size(); ++b) {
    step_.g_blocks[b] = packed(b, step_.g, step_.g_blocks);
  }
}

void EagerSubset::statistics(const ShampooRun& run) {
  for (size_t b = 0; b < batches_.size(); ++b) {
    update_statistics(batches_[b], step_.g_blocks[b], beta2(run.options), step_.guard);
  }
}

// Batches are not cut: the first stage takes all.
void EagerSubset::precondition(const ShampooRun& run, size_t stage) {
  if (stage > 0) {
    return;
  }
  const ShampooOptions& o = run.options;
  for (size_t b = 0; b < batches_.size(); ++b) {
    const at::Tensor m = beta1(o) == 0.0 ? step_.g_blocks[b] : packed(b, step_.m, step_.m_blocks);
    at::Tensor d = detail::precondition(batches_[b], m);
    if (o.grafting().has_value()) {  // |f| / |d| d
      d = graft(d, uses_second_moment(o) ? packed(b, step_.f, step_.f_blocks) : m);
    }
    unpack(batches_[b], group_.blockings, d, group_.params, step_.d);
  }
}

// Before start_preconditioning_step, the grafted direction (m without grafting).
at::Tensor EagerSubset::direction(const ShampooRun& run, size_t i) const {
  const int64_t start = run.options.start_preconditioning_step();
  if (!run.schedule.started[i]) {
    return step_.f[i];
  }
  return run.options.capturable() && start > 1
             ? at::where(group_.states[i].step.ge(start), step_.d[i], step_.f[i])
             : step_.d[i];
}

void EagerSubset::apply(const ShampooRun& run, size_t stage) {
  if (stage > 0) {
    return;
  }
  const ShampooOptions& o = run.options;
  const StepScalar lr = step_.guard.learning_rate(run.lr);
  const UpdateRule rule{.decoupled_weight_decay = run.decoupled_weight_decay,
                        .momentum = o.momentum(),
                        .nesterov = o.nesterov()};
  for (const size_t i : members_) {
    at::Tensor param = group_.params[i], momentum = group_.states[i].momentum_buffer;
    at::Tensor* buffer = momentum.defined() ? &momentum : nullptr;
    if (group_.role == Role::kDirection) {
      param.zero_();
    }
    if (group_.rules[i] == ParameterRule::kGrafted) {
      GradientElements e = elements(run, i);
      grafted_step(gradient_rule(o), rule, lr, e, buffer, step_.guard);
    } else {
      apply_update(rule, lr, param, direction(run, i), buffer, step_.guard);
    }
  }
}

}  // namespace

std::unique_ptr<ShampooSubset> make_eager_subset(const ShampooGroup& group,
                                                 std::vector<size_t> members,
                                                 std::span<MatrixBatch> batches) {
  return std::make_unique<EagerSubset>(group, std::move(members), batches);
}

}  // namespace torchium::optim::detail
