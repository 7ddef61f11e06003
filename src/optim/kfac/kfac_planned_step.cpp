// The step of K-FAC's plan: what it is made of, and what it gets each time.
#include "optim/capture/adaptive_damping.h"
#include "optim/kfac/kfac_plan.h"
#include "optim/kfac/kfac_step.h"
#include "optim/kfac/sharing/shared_sums.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/irange.h>

#include <utility>

namespace torchium::optim::detail {
namespace {

KfacLayer core_layer(const at::Tensor& weight, const KFACParamState& state,
                     const KFACOptions& options) {
  const bool exact = options.damping_split() == "exact";
  KfacLayer layer;
  layer.alpha1 = options.alpha1();
  layer.K = state.K();
  layer.C = state.C();
  layer.m_K = state.m_K();
  layer.m_C = state.m_C();
  layer.A = state.A();
  layer.G = state.G();
  layer.root_dtype = state_dtype(weight);
  layer.A_root = exact ? state.A_eigenvectors() : state.A_inverse();
  layer.G_root = exact ? state.G_eigenvectors() : state.G_inverse();
  layer.A_eigenvalues = state.A_eigenvalues();
  layer.G_eigenvalues = state.G_eigenvalues();
  layer.second_moments = options.ekfac() ? state.second_moments() : at::Tensor();
  layer.moment_updates = state.moment_updates();
  layer.factor_updates = state.factor_updates();
  layer.root_failures = state.root_failures();
  layer.floor = options.eps();
  return layer;
}

UnitwiseLayer unitwise_layer(const KFACParamState& state, const KFACOptions& options) {
  UnitwiseLayer layer;
  layer.blocks = state.fisher_blocks();
  layer.factor_updates = state.factor_updates();
  layer.floor = options.eps();
  return layer;
}

DampingSplit damping_split_of(const KFACOptions& options) {
  return options.damping_split() == "exact" ? DampingSplit::kExact
         : options.damping_split() == "pi"  ? DampingSplit::kPi
                                            : DampingSplit::kPlain;
}

}  // namespace

std::unique_ptr<PlannedStep> KfacPlan::plan(const std::vector<at::Tensor>& params,
                                            const StateList& states, at::Tensor status) {
  for (const Layer& each : layers_) {
    check_layer(each);
  }
  const KFACOptions& shared = options().front();
  KfacGroup group;
  group.params = params;
  group.states = states;
  group.shared = {shared.kl_clip(),   damping_split_of(shared),  shared.solver(),
                  writes_gradients(), shared.adaptive_damping(), shared.capturable()};
  std::vector<int64_t> place(size(), -1);
  for (const auto k : c10::irange(active().size())) {
    const size_t i = active()[k];
    place[i] = static_cast<int64_t>(k);
    const KFACOptions& o = options(i);
    group.options.push_back({{}, o.momentum(), o.weight_decay(), o.maximize()});
    fallback_.insert(param(i).unsafeGetTensorImpl());
  }
  group.exchange = make_exchange(group.shared.damping_split);
  for (const Layer& each : layers_) {
    const auto add = [&](auto& layers, auto layer) {
      layer.weight = place[each.weight];
      layer.bias = each.bias < 0 ? -1 : place[each.bias];
      layers.push_back(std::move(layer));
    };
    if (each.is_unitwise) {
      add(group.unitwise, unitwise_layer(state_of(each.weight), options(each.weight)));
    } else {
      add(group.layers,
          core_layer(param(each.weight), state_of(each.weight), options(each.weight)));
      group.layers.back().is_transposed = each.is_transposed;
      group.layers.back().has_spare_row = each.has_spare_row;
      assign_work(each, group.layers.back());
    }
    fallback_.erase(param(each.weight).unsafeGetTensorImpl());
    if (each.bias >= 0) {
      fallback_.erase(param(each.bias).unsafeGetTensorImpl());
    }
  }
  return std::make_unique<KfacStep>(std::move(group), std::move(status));
}

// Columns of a curvature are not divided.
bool KfacPlan::has_divided_gradients() const {
  return options().front().batch_averaged() && !takes_curvature();
}

// A mean loss has divided the output gradients by N, and N^2 / N makes the sums those of single
// samples. W ranks have W N samples, and gradients that were divided by N.
double KfacPlan::gradient_scale(const FactorSums& sums) const {
  const auto N = static_cast<double>(sums.samples());
  const auto W = static_cast<double>(sums.ranks);
  return sums.is_joint ? 1.0 : (has_divided_gradients() ? N : 1.0 / N) / W;
}

// Takes the loss scale out of the sums, and adds up those of all ranks.
void KfacPlan::finish_sums(const at::Tensor& loss_scale) {
  std::vector<FactorSums*> all;
  std::vector<at::Tensor> of_gradients;
  for (const Layer& each : layers_) {
    if (each.sums != nullptr) {
      all.push_back(each.sums);
      const auto own = each.sums->of_gradients();
      of_gradients.insert(of_gradients.end(), own.begin(), own.end());
    }
  }
  if (loss_scale.defined() && !takes_curvature() && !of_gradients.empty()) {
    at::_foreach_mul_(of_gradients, loss_scale.to(device()).square().reciprocal());
  }
  if (is_shared()) {
    sum_over_ranks(ranks(), all, has_divided_gradients(), same_counts_);
  }
}

void KfacPlan::set_sums(const Layer& of, UnitwiseLayer& layer) const {
  if (of.sums != nullptr && (of.sums->is_joint || of.sums->samples() != 0)) {
    layer.block_sum = of.sums->blocks;
    layer.block_scale = gradient_scale(*of.sums);
  }
}

void KfacPlan::set_sums(const Layer& of, KfacLayer& layer) const {
  if (of.sums == nullptr || (!of.sums->is_joint && of.sums->samples() == 0)) {
    return;
  }
  layer.A_sum = of.sums->A;
  layer.G_sum = of.sums->G;
  layer.A_scale =
      of.sums->is_joint ? 1.0 : 1.0 / static_cast<double>(of.sums->rows * of.sums->ranks);
  layer.G_scale = gradient_scale(*of.sums);
  layer.moment_scale = layer.G_scale;
  if (of.sums->A_is_of_gradients) {
    std::swap(layer.A_scale, layer.G_scale);
  }
  // Where the basis is still that of the recorded calls.
  if (layer.second_moments.defined() && !layer.inverse_lost && !of.sums->has_old_basis) {
    layer.moment_sum = of.sums->moments;
  }
}

// The first steps of layers invert their factors, by decisions of the host.
void KfacPlan::check_captured(const KfacGroup& group) const {
  TORCH_CHECK(!torchium::detail::is_capturing(device()) ||
                  std::ranges::none_of(
                      group.layers, [](const auto& l) { return l.inverse_due || l.inverse_lost; }),
              "step() cannot be captured yet: factors or inverses are new; run a step before the "
              "capture");
}

// Sets what the layers of a planned step have of one step.
void KfacPlan::set_layers(KfacGroup& group) {
  const auto taken = host_decides() ? known_steps(active()) : std::vector<int64_t>();
  auto layer_of = group.layers.begin();
  auto unitwise_of = group.unitwise.begin();
  for (const Layer& each : layers_) {
    const auto set_options = [&](auto& layer) {
      layer.damping = options(each.weight).damping();
      layer.stat_decay = options(each.weight).stat_decay();
      set_sums(each, layer);
    };
    if (each.is_unitwise) {
      set_options(*unitwise_of++);
      continue;
    }
    KfacLayer& layer = *layer_of++;
    layer.inverse_due = !each.has_factors ||
                        (host_decides() && taken[layer.weight] % options(each.weight).TInv() == 0);
    layer.inverse_lost = is_lost(each);
    set_options(layer);  // after inverse_lost, on which the sums depend
    if (layer.is_inverse_free()) {
      layer.inverse_due = layer.has_sums();
      layer.inverse_lost = false;
    }
  }
}

StateChanges KfacPlan::take_agreed(const JointInputs& inputs) {
  auto* step = static_cast<KfacStep*>(planned());
  if (step == nullptr) {
    return {};
  }
  KfacGroup& group = step->group();
  const auto lrs = learning_rates(inputs);
  for (const auto k : c10::irange(lrs.size())) {
    group.options[k].lr = lrs[k];
  }
  group.shared.kl_clip = options().front().kl_clip();
  const auto end = c10::make_scope_exit([&] {
    step->forget_sums();  // memory of the captures
    prediction_ = step->take_prediction();
  });
  finish_sums(inputs.loss_scale);
  set_layers(group);
  check_captured(group);
  due_.clear();
  ++steps_since_update_;
  try {
    StepPlan::step({}, inputs.found_inf);
  } catch (...) {  // perhaps after the counts were advanced: the next step would not be due
    if (is_shared() && !device().is_cpu()) {  // on a CPU all ranks have raised
      leave_step();
    }
    for (const KfacLayer& layer : group.layers) {
      if (layer.inverse_due) {
        lost_inverses_.insert(param(active()[layer.weight]).unsafeGetTensorImpl());
      }
    }
    throw;
  }
  for (const Layer& each : layers_) {
    lost_inverses_.erase(param(each.weight).unsafeGetTensorImpl());
  }
  if (!device().is_cpu()) {  // on the CPU a skipped step is known at once
    for (const Layer& each : layers_) {
      with_factors_.insert(state_of(each.weight).factor_updates().unsafeGetTensorImpl());
      if (!each.has_factors) {
        unconfirmed_.insert(param(each.weight).unsafeGetTensorImpl());
      }
    }
  }
  return {};
}

void KfacPlan::update_preconditioners() {
  TORCH_CHECK(!torchium::detail::is_capturing(device()),
              "a CUDA graph cannot capture this call: the host decides in "
              "update_preconditioners() what is inverted. Call it between replays");
  agree_to("update_preconditioners()", [] {});
  for (const auto i : c10::irange(size())) {  // but for the layers below
    lost_inverses_.insert(param(i).unsafeGetTensorImpl());
  }
  auto* step = static_cast<KfacStep*>(planned());
  int64_t has_changed = step == nullptr || !is_unchanged() ? 1 : 0;
  if (is_shared()) {  // perhaps on one rank alone
    has_changed = ranks().all_reduce_max({has_changed}).front();
  }
  if (has_changed != 0) {
    return;
  }
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  for (KfacLayer& layer : step->group().layers) {
    layer.damping = options(active()[layer.weight]).damping();
  }
  {
    const std::lock_guard lock(records_mutex_);
    records_.note_new_bases();
  }
  step->renew_inverses();
  for (const KfacLayer& layer : step->group().layers) {
    lost_inverses_.erase(param(active()[layer.weight]).unsafeGetTensorImpl());
  }
  note_roots();
  StepPlan::report();
}

std::pair<double, double> KfacPlan::damping_update(double loss_before, double loss_after) {
  agree_to("update_damping()", [&] {
    TORCH_CHECK_VALUE(
        !writes_gradients(), optimizer_name(),
        " does not take the step of the parameters, which update_damping() compares with "
        "its model; use KFAC");
    TORCH_CHECK_VALUE(!options().empty() && options().front().adaptive_damping(),
                      "update_damping() needs adaptive_damping=True");
  });
  std::optional<double> predicted;
  if (prediction_ && steps_since_update_ > 0) {
    predicted = prediction_->reduction();
  }
  const DampingLosses losses =
      joint_losses({loss_before, loss_after, options().front().maximize()});
  const auto update = detail::damping_update(predicted, steps_since_update_, losses);
  steps_since_update_ = 0;
  return update;
}

}  // namespace torchium::optim::detail
