#include "optim/kfac/kfac_step.h"

#include "optim/blocked/root_failures.h"
#include "optim/capture/adaptive_damping.h"
#include "optim/core/argument_checks.h"
#include "optim/kfac/cuda/kfac_kernels.h"
#include "optim/kfac/factors/inverse_free.h"
#include "optim/kfac/factors/kfac_inverses.h"
#include "support/phase.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace torchium::optim::detail {
namespace {

// The largest accepted entry of a factor, with a margin for rounding.
double largest_factor(at::ScalarType dtype) { return largest_number(dtype) / 4.0; }

// min(1, sqrt(kl_clip / |sum of the terms|))
StepScalar kl_scale(std::optional<double> kl_clip, const at::Tensor& all) {
  if (!kl_clip || !all.defined()) {
    return {};
  }
  if (!all.is_cpu()) {
    return {0.0, kl_scale_on_device(*kl_clip, all)};
  }
  double sum = 0.0;
  for (int64_t i = 0; i < all.numel(); ++i) {
    sum += all.const_data_ptr<double>()[i];
  }
  return {std::min(1.0, std::sqrt(*kl_clip / std::abs(sum))), {}};
}

// Squares are as large as K and C, and those of a smaller dtype are to save memory.
bool fits_squares(const KfacLayer& layer) {
  const auto fits = [](const at::Tensor& root) {
    return root.is_cuda() && root.scalar_type() == at::kFloat &&
           (root.dim() == 2 || root.size(1) == root.size(2));
  };
  return layer.is_inverse_free() && fits(layer.K) && fits(layer.C);
}

// Whether kernels take the layer. Squares of K and C exist for them alone.
bool choose_kernels(const KfacGroup& group, KfacLayer& layer) {
  if (fits_squares(layer)) {
    make_room_for_squares(layer);
  }
  // No kernel divides by second moments, multiplies by K and C, or averages factors of another
  // dtype than their sums.
  const bool has_kernels = !layer.second_moments.defined() &&
                           (!layer.is_inverse_free() || has_squares(layer)) &&
                           layer.has_state_dtype() && has_kfac_kernels(group, layer);
  if (has_squares(layer) && !has_kernels) {
    drop_squares(layer);
  }
  return has_kernels;
}

// Undefined: none.
at::Tensor joined_terms(const std::vector<at::Tensor>& terms) {
  return terms.size() > 1 ? at::cat(terms) : terms.empty() ? at::Tensor() : terms[0];
}

// What the prologue examines of a sum. The largest entry of a sum of x x^T is on its diagonal
// (Cauchy and Schwarz). Second moments have no diagonal, and compact sums are small. A GPU reads a
// diagonal where it is, unless a layer has several.
at::Tensor examined_part(const at::Tensor& sum) {
  const bool is_dense = sum.dim() == 3 && sum.size(1) == sum.size(2);
  if (!is_dense) {
    return sum;
  }
  return sum.is_cpu()       ? sum.diagonal(0, -2, -1).contiguous()
         : sum.size(0) == 1 ? sum[0].diagonal()
                            : sum;
}

}  // namespace

KfacStep::KfacStep(KfacGroup group, at::Tensor status)
    : group_(std::move(group)), status_(std::move(status)) {
  for (size_t i = 0; i < group_.params.size(); ++i) {
    if (group_.options[i].momentum == 0.0) {
      group_.states[i].momentum_buffer.reset();  // stays in the state, for a later momentum
    }
  }
  for (const KfacLayer& layer : group_.layers) {
    if (layer.is_transposed) {
      at::Tensor& weight = group_.params[layer.weight];
      at::Tensor& buffer = group_.states[layer.weight].momentum_buffer;
      weight = weight.detach().t();
      buffer = buffer.defined() ? buffer.detach().t() : buffer;
    }
  }
  check_parameters(group_.params, list_of(group_.states, &ParameterState::step), status_);
  make_subsets();
}

void KfacStep::make_subsets() {
  std::vector<double> weight_decays;
  for (const auto& options : group_.options) {
    weight_decays.push_back(options.weight_decay);
  }
  prologue_ = StepPrologue::make(group_.params, group_.states, status_, weight_decays);
  KfacMembers by_kernels, eager;
  std::vector<bool> has_layer(group_.params.size(), false), runs_by_kernels;
  for (size_t l = 0; l < group_.layers.size(); ++l) {
    KfacLayer& layer = group_.layers[l];
    runs_by_kernels.push_back(choose_kernels(group_, layer));
    KfacMembers& members = runs_by_kernels.back() ? by_kernels : eager;
    members.layers.push_back(l);
    for (const int64_t i : layer.params()) {
      members.params.push_back(i);
      has_layer[i] = true;
    }
  }
  for (size_t l = 0; l < group_.unitwise.size(); ++l) {
    const UnitwiseLayer& layer = group_.unitwise[l];
    const bool has_kernels = has_kfac_kernels(group_, layer);
    (has_kernels ? by_kernels : eager).norms.push_back(l);
    for (const int64_t i : layer.params()) {
      has_layer[i] = true;
      if (has_kernels) {
        by_kernels.params.push_back(i);
      }
    }
  }
  for (size_t i = 0; i < group_.params.size(); ++i) {
    if (!has_layer[i] && !group_.shared.writes_gradients) {
      (has_kfac_kernels(group_, i) ? by_kernels : eager).params.push_back(i);
    }
  }
  all_by_kernels_ = eager.params.empty() && eager.norms.empty();
  if (!by_kernels.params.empty()) {
    subsets_.push_back(make_kfac_kernels(group_, std::move(by_kernels), *prologue_));
  }
  if (!eager.norms.empty()) {
    subsets_.push_back(make_unitwise_subset(group_, std::move(eager.norms)));
  }
  if (!eager.params.empty()) {
    subsets_.push_back(make_eager_subset(group_, std::move(eager)));
  }
  for (const bool by_kernel : runs_by_kernels) {
    subset_of_.push_back(by_kernel ? 0 : subsets_.size() - 1);
  }
}

void KfacStep::forget_sums() {
  for (KfacLayer& layer : group_.layers) {
    layer.A_sum.reset();
    layer.G_sum.reset();
    layer.moment_sum.reset();
  }
  for (UnitwiseLayer& layer : group_.unitwise) {
    layer.block_sum.reset();
  }
}

void KfacStep::begin(std::vector<at::Tensor> grads) {
  for (const KfacLayer& layer : group_.layers) {
    if (layer.is_transposed) {
      grads[layer.weight] = grads[layer.weight].detach().t();
    }
  }
  PrologueStep::begin(std::move(grads));
}

void KfacStep::examine_sums() {
  for (const KfacLayer& layer : group_.layers) {
    if (!layer.has_sums()) {
      continue;
    }
    const double largest =
        std::min(largest_factor(layer.A_sum.scalar_type()), largest_factor(layer.factor_dtype()));
    for (const auto& [sum, scale] :
         {std::pair(layer.A_sum, layer.A_scale), std::pair(layer.G_sum, layer.G_scale)}) {
      prologue_->examine(examined_part(sum), static_cast<size_t>(layer.weight),
                         largest / std::max(scale, 1.0));
    }
    if (layer.moment_sum.defined()) {
      prologue_->examine(
          layer.moment_sum, static_cast<size_t>(layer.weight),
          largest_factor(layer.moment_sum.scalar_type()) / std::max(layer.moment_scale, 1.0));
    }
  }
  for (const UnitwiseLayer& layer : group_.unitwise) {
    if (layer.has_sums()) {
      prologue_->examine(
          layer.block_sum, static_cast<size_t>(layer.weight),
          largest_factor(layer.block_sum.scalar_type()) / std::max(layer.block_scale, 1.0));
    }
  }
}

void KfacStep::update_inverses(bool KfacLayer::*wanted, const FoundInfGuard& guard,
                               HeldError& held) {
  if (std::ranges::none_of(group_.layers, wanted)) {
    return;
  }
  const torchium::detail::Phase phase("torchium::inverses");
  held.run([&] {
    if (group_.shared.solver == "inverse_free") {
      update_inverse_free(group_.layers, guard);
    } else {
      detail::update_inverses(group_.layers, wanted, group_.shared.damping_split,
                              group_.shared.solver, guard);
    }
  });
  if (group_.exchange) {
    group_.exchange->send_inverses(group_.layers, wanted);
  }
}

void KfacStep::renew_inverses() {
  const auto set_all = [&](bool wanted) {
    for (KfacLayer& layer : group_.layers) {
      layer.inverse_lost = wanted;
    }
  };
  set_all(true);
  const auto reset = c10::make_scope_exit([&] { set_all(false); });
  HeldError held;
  update_inverses(&KfacLayer::inverse_lost, FoundInfGuard::open(), held);
  held.run([&] { record_failures(); });
  all_go_on(/*is_kept=*/true, held);
  held.raise();
}

// After an error other ranks still wait for tensors of these sizes.
std::vector<at::Tensor> KfacStep::direction(size_t layer, const HeldError& held) const {
  if (!held.is_set()) {
    return subsets_[subset_of_[layer]]->directions(layer);
  }
  std::vector<at::Tensor> zeros;
  for (const int64_t i : group_.layers[layer].params()) {
    const at::Tensor& param = group_.params[i];
    zeros.push_back(at::zeros(param.sizes(), param.options().dtype(state_dtype(param))));
  }
  return zeros;
}

void KfacStep::send_directions(const HeldError& held) const {
  if (group_.exchange) {
    group_.exchange->send_directions(group_.layers, [&](size_t l) { return direction(l, held); });
  }
}

bool KfacStep::all_go_on(bool is_kept, const HeldError& held) const {
  if (!group_.exchange) {
    held.raise();
    return is_kept;
  }
  return status_.is_cpu() ? group_.exchange->all_go_on(is_kept, held) : is_kept;
}

void KfacStep::record_failures() {
  if (std::ranges::none_of(group_.layers,
                           [](const auto& l) { return l.inverse_due || l.inverse_lost; })) {
    return;
  }
  std::vector<RootFailures> failures;
  for (const KfacLayer& layer : group_.layers) {
    failures.push_back({layer.root_failures, layer.weight});
  }
  record_root_failures(failures, status_);
}

std::vector<at::Tensor> KfacStep::copy_learning_rates() const {
  std::vector<at::Tensor> lrs;
  const at::Tensor* before = nullptr;
  const auto copy_those_of = [&](const auto& layers) {
    for (const auto& layer : layers) {
      for (const int64_t i : layer.params()) {
        const at::Tensor& lr = group_.options[i].lr;
        if (before == nullptr || !lr.is_same(*before)) {
          lrs.push_back(lr.clone());
        }
        before = &lr;
      }
    }
  };
  copy_those_of(group_.layers);
  copy_those_of(group_.unitwise);
  return lrs;
}

// With delta = -lr nu d and (F + damping I) d = V, the model V . delta + delta . (F + damping I)
// delta / 2 is -(lr nu - lr^2 nu^2 / 2) V . d.
double KfacPrediction::reduction() const {
  if (!terms.defined()) {
    return 0.0;
  }
  const double lr = common_learning_rate(lrs);
  const double factor = nu.device.defined() ? nu.device.item<double>() : nu.host;
  return lr > 0.0 ? terms.sum().item<double>() * (factor / lr - factor * factor / 2.0) : 0.0;
}

void KfacStep::run(const at::Tensor&, at::IntArrayRef, const at::Tensor& found_inf) {
  const auto end = c10::make_scope_exit([&] {
    for (const auto& subset : subsets_) {
      subset->end();
    }
  });
  HeldError held;
  if (group_.shared.keeps_prediction) {
    prediction_ = KfacPrediction{.lrs = copy_learning_rates()};
  }
  update_inverses(&KfacLayer::inverse_lost, FoundInfGuard::open(), held);
  bool is_kept = true;
  held.run([&] {
    const torchium::detail::Phase phase("torchium::elementwise");
    examine_sums();
    is_kept = prologue_->run({}, found_inf);  // t <- t + 1, unless it is skipped
  });
  if (!all_go_on(is_kept, held)) {
    return;
  }
  const KfacRun run{grads_, *prologue_};
  held.run([&] {
    const torchium::detail::Phase phase("torchium::factors");
    for (const auto& subset : subsets_) {  // A <- d A + (1 - d) E[a a^T], G likewise with g
      subset->update_factors(run);
    }
  });
  // Where due: (A + ..I)^-1, (G + ..I)^-1; or K and C, from the sums.
  update_inverses(&KfacLayer::inverse_due, prologue_->guard(), held);
  held.run([&] {
    renew_squares(group_.layers);
    record_failures();
  });
  StepScalar nu;
  {
    const torchium::detail::Phase phase("torchium::precondition");
    nu = precondition(run, held);
  }
  all_go_on(/*is_kept=*/true, held);
  held.raise();
  const torchium::detail::Phase phase("torchium::elementwise");
  for (const auto& subset : subsets_) {  // buf <- momentum buf + nu d; p <- p - lr buf
    subset->apply(run, nu);              // or .grad <- nu d
  }
}

// ---- graphs

bool KfacStep::renews_factors_or_inverses() const {
  return std::ranges::any_of(group_.layers,
                             [](const KfacLayer& layer) {
                               return layer.has_sums() || layer.inverse_due || layer.inverse_lost;
                             }) ||
         std::ranges::any_of(group_.unitwise,
                             [](const UnitwiseLayer& layer) { return layer.has_sums(); });
}

bool KfacStep::has_other_lr(size_t k) const {
  return k == 0 || !group_.options[k].lr.is_same(group_.options[k - 1].lr);
}

std::optional<GraphKey> KfacStep::graph_key(at::IntArrayRef) const {
  const KfacSharedOptions& shared = group_.shared;
  if (!all_by_kernels_ || group_.exchange || shared.writes_gradients || shared.keeps_prediction ||
      shared.solver == "inverse_free" || renews_factors_or_inverses()) {
    return std::nullopt;
  }
  GraphKey key;
  prologue_->add_to(key);
  for (size_t k = 0; k < group_.options.size(); ++k) {
    key.push_back(has_other_lr(k));
  }
  return subsets_.front()->add_to(key) ? std::optional(std::move(key)) : std::nullopt;
}

std::vector<at::Tensor> KfacStep::inputs() {
  std::vector<at::Tensor> lrs;
  for (size_t k = 0; k < group_.options.size(); ++k) {
    if (has_other_lr(k)) {
      lrs.push_back(group_.options[k].lr);
    }
  }
  return lrs;
}

void KfacStep::set_inputs(at::TensorList inputs) {
  std::vector<bool> is_other;
  for (size_t k = 0; k < group_.options.size(); ++k) {
    is_other.push_back(has_other_lr(k));
  }
  size_t next = 0;
  for (size_t k = 0; k < group_.options.size(); ++k) {
    group_.options[k].lr = is_other[k] ? inputs[next++] : group_.options[k - 1].lr;
  }
}

std::vector<at::Tensor> KfacStep::kept_tensors() const {
  std::vector<at::Tensor> kept = PrologueStep::kept_tensors();
  for (const KfacLayer& layer : group_.layers) {
    if (layer.is_inverse_free()) {  // squares of K and C
      kept.insert(kept.end(), {layer.A_root, layer.G_root});
    }
  }
  for (const auto& subset : subsets_) {
    kept.push_back(subset->kept());
  }
  return kept;
}

// d = (G + ..I)^-1 V (A + ..I)^-1, or C C^T V K K^T, by the workers of each layer. Returns nu.
StepScalar KfacStep::precondition(const KfacRun& run, HeldError& held) {
  held.run([&] {
    for (const auto& subset : subsets_) {
      subset->precondition(run);
    }
  });
  send_directions(held);
  StepScalar nu;
  held.run([&] {
    std::vector<at::Tensor> terms;
    for (const auto& subset : subsets_) {
      const bool needs_terms = group_.shared.kl_clip || group_.shared.keeps_prediction;
      const at::Tensor its = needs_terms ? subset->kl_terms(run) : at::Tensor();
      if (its.defined()) {
        terms.push_back(its);
      }
    }
    const at::Tensor all_terms = joined_terms(terms);
    nu = kl_scale(group_.shared.kl_clip, all_terms);
    if (prediction_) {
      prediction_->terms = all_terms;
      prediction_->nu = nu;
    }
  });
  return nu;
}

}  // namespace torchium::optim::detail
