#include "optim/adagrad/adagrad_step.h"

#include "optim/adagrad/cuda/adagrad_kernels.h"
#include "optim/blocked/preconditioner.h"
#include "optim/core/argument_checks.h"
#include "optim/core/found_inf_guard.h"
#include "support/phase.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <limits>
#include <numeric>
#include <utility>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

// lr / (1 + (t - 1) lr_decay)
StepScalar decayed_learning_rate(const AdagradOptions& o, const at::Tensor& step,
                                 const StepScalar& lr) {
  if (o.lr_decay() == 0.0) {
    return lr;
  }
  if (!lr.device.defined()) {
    return {lr.host / (1.0 + (count_on_cpu(step) - 1.0) * o.lr_decay()), {}};
  }
  return {0.0, lr.device / ((step.to(at::kDouble) - 1.0) * o.lr_decay() + 1.0)};
}

at::Tensor gradient(const AdagradRun& run, const at::Tensor& param, size_t i,
                    const FoundInfGuard& guard) {
  return signed_gradient(param, run.grads[i], run.options.maximize(), run.options.weight_decay(),
                         guard);
}

// s <- s + g^2; p <- p - lr g / (sqrt(s) + eps). The order of operations is torch.optim.Adagrad's.
class EagerDiagonal : public AdagradSubset {
 public:
  EagerDiagonal(const AdagradGroup& group, std::vector<size_t> members)
      : group_(group), members_(std::move(members)) {}

  void update(const AdagradRun& run) override {
    const FoundInfGuard guard = run.prologue.guard();
    const StepScalar lr = guard.learning_rate(run.lr);
    for (const size_t i : members_) {
      const ParameterState& state = group_.states[i];
      at::Tensor param = group_.params[i], sum = state.sum;
      const at::Tensor g = gradient(run, param, i, guard);
      update(run.options, param, g, sum, decayed_learning_rate(run.options, state.step, lr), guard);
    }
  }

 private:
  static void update(const AdagradOptions& o, at::Tensor& param, const at::Tensor& g,
                     at::Tensor& sum, const StepScalar& lr, const FoundInfGuard& guard) {
    sum.addcmul_(g, g);
    at::Tensor root = sum.sqrt().add_(o.eps());
    if (o.eps() == 0.0) {  // 0 / 0 becomes 0
      root.masked_fill_(root.eq(0), std::numeric_limits<double>::infinity());
    }
    if (!lr.device.defined() && param.scalar_type() == g.scalar_type()) {
      param.addcdiv_(g, root, -lr.host);
      if (lr.host > 1.0) {  // |g| / root <= 1: smaller steps cannot overflow
        const double most = largest_number(param.scalar_type());
        param.clamp_(-most, most);
      }
    } else {
      subtract_scaled_(param, guard.zero_if_skipped(g / root), lr);
    }
  }

  const AdagradGroup& group_;
  std::vector<size_t> members_;
};

class FullMatrix : public AdagradSubset {
 public:
  FullMatrix(const AdagradOptions& o, const AdagradGroup& group)
      : group_(group), blockings_(adagrad_blockings(group.params, o.block_size())) {
    std::vector<size_t> all(group.params.size());
    std::iota(all.begin(), all.end(), 0);
    batches_ = find_batches(blockings_, group.states, all);
  }

  // G <- G + g g^T; R = (G + eps I)^(-1/2) when due; p <- p - lr R g
  void update(const AdagradRun& run) override {
    const FoundInfGuard guard = run.prologue.guard();
    Tensors g, blocks, directions(group_.params.size());
    for (size_t i = 0; i < group_.params.size(); ++i) {
      g.push_back(gradient(run, group_.params[i], i, guard));
    }
    {
      const torchium::detail::Phase phase("torchium::statistics");
      for (MatrixBatch& batch : batches_) {
        blocks.push_back(pack(batch, blockings_, g, {}));
        update_statistics(batch, blocks.back(), 1.0, guard);
      }
    }
    update_due_roots(run, guard);
    {
      const torchium::detail::Phase phase("torchium::precondition");
      for (size_t b = 0; b < batches_.size(); ++b) {
        unpack(batches_[b], blockings_, precondition(batches_[b], blocks[b]), group_.params,
               directions);
      }
    }
    const StepScalar lr = guard.learning_rate(run.lr);
    for (size_t i = 0; i < directions.size(); ++i) {
      at::Tensor param = group_.params[i];
      if (directions[i].defined()) {
        subtract_scaled_(param, finite_entries(directions[i]),
                         decayed_learning_rate(run.options, group_.states[i].step, lr));
      }
    }
  }

 private:
  void update_due_roots(const AdagradRun& run, const FoundInfGuard& guard) {
    std::vector<int64_t> due_steps;
    bool any_due = false;
    for (size_t i = 0; i < group_.params.size(); ++i) {
      const int64_t t = step_on_host(group_.states[i].step, run.host_steps, i);
      due_steps.push_back(root_is_due(t, 1, run.options.update_freq()) ? t : 0);
      any_due |= due_steps.back() != 0;
    }
    if (any_due) {
      const torchium::detail::Phase phase("torchium::roots");
      const std::vector<StepScalar> no_correction(group_.params.size());
      update_roots(batches_, {run.options.eps(), 0.0, -0.5, run.options.root_method()}, due_steps,
                   no_correction, guard);
      at::Tensor status = group_.status;
      record_root_failures(batches_, status);
    }
  }

  const AdagradGroup& group_;
  std::vector<Blocking> blockings_;
  std::vector<MatrixBatch> batches_;  // refer to blockings_
};

}  // namespace

// Not numel(), which a tensor with symbolic sizes does not have.
std::vector<Blocking> adagrad_blockings(at::TensorList params, int64_t block_size) {
  std::vector<Blocking> blockings;
  for (const at::Tensor& param : params) {
    blockings.push_back(make_blocking({c10::multiply_integers(param.sizes())}, block_size));
  }
  return blockings;
}

AdagradStep::AdagradStep(const AdagradOptions& options, AdagradGroup group)
    : options_(options), group_(std::move(group)) {
  prologue_ =
      StepPrologue::make(group_.params, group_.states, group_.status, options.weight_decay());
  if (options.full_matrix()) {
    subsets_.push_back(std::make_unique<FullMatrix>(options, group_));
    return;
  }
  std::vector<size_t> by_kernels, eager;
  for (size_t i = 0; i < group_.params.size(); ++i) {
    (has_adagrad_kernels(group_, i) ? by_kernels : eager).push_back(i);
  }
  if (!by_kernels.empty()) {
    subsets_.push_back(make_adagrad_kernels(group_, by_kernels, *prologue_));
  }
  if (!eager.empty()) {
    subsets_.push_back(std::make_unique<EagerDiagonal>(group_, std::move(eager)));
  }
}

void AdagradStep::run(const at::Tensor& lr, at::IntArrayRef host_steps,
                      const at::Tensor& found_inf) {
  const torchium::detail::Phase phase("torchium::elementwise");
  const StepRule rule{.weight_decay = options_.weight_decay()};
  if (!prologue_->run(rule, found_inf)) {  // t <- t + 1, unless it is skipped
    return;
  }
  for (const auto& subset : subsets_) {
    subset->update({options_, lr, grads_, host_steps, *prologue_});
  }
}

}  // namespace torchium::optim::detail
