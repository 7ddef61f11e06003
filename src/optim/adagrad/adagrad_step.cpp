#include "optim/adagrad/adagrad_step.h"

#include "optim/adagrad/cuda/adagrad_kernels.h"
#include "optim/blocked/preconditioner.h"
#include "optim/core/argument_checks.h"
#include "optim/core/found_inf_guard.h"
#include "support/phase.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>
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

RootRule root_rule(const AdagradOptions& o) { return {o.eps(), 0.0, -0.5, o.root_method()}; }

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
  FullMatrix(const AdagradOptions& options, const AdagradGroup& group,
             const std::vector<size_t>& all)
      : options_(options),
        group_(group),
        blockings_(adagrad_blockings(group.params, options.block_size())),
        batches_(find_batches(blockings_, group.states, all)) {}

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

  // A graph holds no roots, or all of them.
  bool add_to(GraphKey& key, at::IntArrayRef host_steps) const override {
    const auto due = static_cast<size_t>(
        std::ranges::count_if(host_steps, [&](int64_t before) { return is_due(before + 1); }));
    const bool fits = due == 0 || (due == host_steps.size() &&
                                   std::ranges::all_of(batches_, [&](const MatrixBatch& batch) {
                                     return renews_on_device(batch, root_rule(options_));
                                   }));
    key.push_back(static_cast<uint8_t>(due != 0));
    add_global_settings(key);
    return fits;
  }

 private:
  bool is_due(int64_t t) const { return root_is_due(t, 1, options_.update_freq()); }

  void update_due_roots(const AdagradRun& run, const FoundInfGuard& guard) {
    std::vector<int64_t> due_steps;
    bool any_due = false;
    for (size_t i = 0; i < group_.params.size(); ++i) {
      const int64_t t = step_on_host(group_.states[i].step, run.host_steps, i);
      due_steps.push_back(is_due(t) ? t : 0);
      any_due |= due_steps.back() != 0;
    }
    if (any_due) {
      const torchium::detail::Phase phase("torchium::roots");
      const std::vector<StepScalar> no_correction(group_.params.size());
      update_roots(batches_, root_rule(options_), due_steps, no_correction, guard);
      at::Tensor status = group_.status;
      record_root_failures(batches_, status);
    }
  }

  const AdagradOptions& options_;
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
  std::vector<size_t> by_kernels;
  for (size_t i = 0; i < group_.params.size(); ++i) {
    const bool has_kernels = !options.full_matrix() && has_adagrad_kernels(group_, i);
    (has_kernels ? by_kernels : read_by_operators_).push_back(i);
  }
  if (options.full_matrix()) {
    subsets_.push_back(std::make_unique<FullMatrix>(options, group_, read_by_operators_));
    return;
  }
  if (!by_kernels.empty()) {
    subsets_.push_back(make_adagrad_kernels(group_, by_kernels, *prologue_));
  }
  if (!read_by_operators_.empty()) {
    subsets_.push_back(std::make_unique<EagerDiagonal>(group_, read_by_operators_));
  }
}

std::optional<GraphKey> AdagradStep::graph_key(at::IntArrayRef host_steps) const {
  GraphKey key;
  prologue_->add_to(key);
  const bool fits = std::ranges::all_of(
      subsets_, [&](const auto& subset) { return subset->add_to(key, host_steps); });
  return fits ? std::optional(std::move(key)) : std::nullopt;
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
