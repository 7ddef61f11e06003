#include "optim/kfac/kfac_plan.h"

#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

// Whether a norm's sums, and the state of its weight, have blocks of one order.
bool blocks_fit(const FactorSums& sums, const KFACParamState& state) {
  return !state.fisher_blocks().defined() || sums.blocks.sizes() == state.fisher_blocks().sizes();
}

// Of the inverse or eigensystem of a factor of this stored shape.
int64_t inversion_cost(const std::vector<int64_t>& sizes) {
  const bool is_dense = sizes.size() == 3 && sizes[1] == sizes[2];
  return is_dense ? sizes[0] * sizes[1] * sizes[1] * sizes[1] : c10::multiply_integers(sizes);
}

bool sums_fit(const FactorSums& sums, const at::Tensor& weight, const FactorLayout& layout) {
  return sums.A.sizes() == layout.sizes_A(weight) && sums.G.sizes() == layout.sizes_G(weight);
}

}  // namespace

void KfacPlan::after_set_options() {
  if (!due_.empty()) {  // calls may be recorded between a change and the step
    due_.clear();
    due();
  }
  const std::string split = options().empty() ? std::string() : options().front().damping_split();
  if (!damping_split_.empty() && split != damping_split_) {
    for (const auto i : c10::irange(size())) {
      lost_inverses_.insert(param(i).unsafeGetTensorImpl());
    }
  }
  damping_split_ = split;
  const bool has_roots = !options().empty() && is_inverse_free(options().front());
  if (has_roots != is_inverse_free_) {
    is_inverse_free_ = has_roots;
    checked_.assign(size(), false);  // the state is that of another solver
  }
  if (!fisher_.empty() && fisher() != fisher_) {
    forget();
  }
  fisher_ = fisher();
  forget_graphs(graph_mode(options().empty() ? "never" : options().front().graphs()));
}

FactorWeight KfacPlan::weight_of(size_t i) const {
  const KFACParamState& state = state_of(i);
  FactorWeight weight{param(i),
                      factor_of_inputs(state),
                      factor_of_gradients(state),
                      state.fisher_blocks(),
                      options(i).max_factor_size(),
                      options(i).weight_sharing() == "reduce"
                          ? gradients::detail::WeightSharing::kReduce
                          : gradients::detail::WeightSharing::kExpand,
                      structures_of(options(i))};
  if (options(i).ekfac() && has_second_moments(state, param(i))) {
    const auto as_sums = [&](const at::Tensor& vectors) {  // state follows its parameter later
      return vectors.to(param(i).device(), state_dtype(param(i)));
    };
    weight.basis = {as_sums(state.A_eigenvectors()), as_sums(state.G_eigenvectors())};
  }
  return weight;
}

void KfacPlan::after_bind() {
  due_.clear();
  layers_.clear();
  checked_.assign(size(), false);
  std::unordered_set<const at::TensorImpl*> counts;
  for (const auto i : c10::irange(size())) {
    counts.insert(state_of(i).factor_updates().unsafeGetTensorImpl());
  }
  std::erase_if(with_factors_, [&](const auto* count) { return counts.count(count) == 0; });
  std::unordered_set<const at::TensorImpl*> params;
  for (const auto i : c10::irange(size())) {
    params.insert(param(i).unsafeGetTensorImpl());
  }
  const auto is_known = [&](const at::TensorImpl* impl) { return params.count(impl) != 0; };
  records_.keep_only(is_known);
  for (auto* set : {&fallback_, &warned_, &warned_of_samples_, &warned_of_disagreement_,
                    &lost_inverses_, &unconfirmed_, &reached_}) {
    std::erase_if(*set, [&](const auto* impl) { return !is_known(impl); });
  }
  std::erase_if(owners_, [&](const auto& entry) { return !is_known(entry.first); });
}

// ---- layer calls

const std::vector<bool>& KfacPlan::due() {
  if (!host_decides()) {
    due_.assign(size(), true);
  } else if (due_.empty()) {
    take_reports(/*wait=*/false);
    const auto taken = steps_taken();
    for (const auto i : c10::irange(size())) {
      due_.push_back(taken[i] % options(i).TCov() == 0);
    }
  }
  return due_;
}

void KfacPlan::record(gradients::detail::LayerCall call) {
  if (!takes_curvature()) {
    add_to_sums(std::move(call), nullptr);
  }
}

void KfacPlan::set_loss_scale(at::Tensor scale) {
  const std::lock_guard lock(records_mutex_);
  loss_scale_ = std::move(scale);
}

bool KfacPlan::is_due(const gradients::detail::LayerCall& call) const {
  return call.weight >= 0 && call.weight < static_cast<int64_t>(due_.size()) && due_[call.weight];
}

void KfacPlan::add_to_sums(gradients::detail::LayerCall call, const CurvatureColumn* column) {
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (!is_due(call)) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // many small operators
  const std::lock_guard lock(records_mutex_);
  const FactorWeight weight = weight_of(call.weight);
  if (loss_scale_.defined() && column == nullptr) {  // before squaring, which may overflow
    const at::Tensor& g = call.output_gradient;
    call.output_gradient =
        g.to(state_dtype(weight.param)) / loss_scale_.to(g.device(), /*non_blocking=*/true);
  }
  FactorLayer seen;
  seen.is_transposed_convolution = gradients::detail::is_transposed_convolution(call);
  (seen.is_transposed_convolution ? seen.lone_bias : seen.bias) =
      call.bias < 0 ? at::Tensor() : param(call.bias);
  seen.is_transposed = gradients::detail::has_transposed_weight(call);
  seen.groups = gradients::detail::groups_of(call);
  records_.record(weight, call, seen, column);
}

void KfacPlan::receive(gradients::detail::LayerCall call, const std::vector<int64_t>& gone_passes) {
  if (!gone_passes.empty()) {
    drop(call.weight, gone_passes);
  }
  if (takes_curvature()) {
    note_reached(call);
  }
  record(std::move(call));
}

void KfacPlan::declare(const std::vector<DeclaredLayer>& layers) {
  const std::lock_guard lock(records_mutex_);
  for (const DeclaredLayer& each : layers) {
    FactorLayer layer;
    layer.groups = each.groups;
    layer.bias = each.bias < 0 ? at::Tensor() : param(each.bias);
    layer.is_transposed = each.is_transposed;
    layer.is_transposed_convolution = each.is_transposed_convolution;
    layer.is_tied = each.is_tied;
    layer.is_table = each.is_table;
    layer.is_unitwise = each.is_unitwise;
    layer.problem = each.falls_back ? "falls back" : "";
    records_.declare(param(each.weight), std::move(layer));
  }
}

void KfacPlan::drop(int64_t weight, at::IntArrayRef passes) {
  if (!takes_curvature() && weight >= 0 && weight < static_cast<int64_t>(size())) {
    const std::lock_guard lock(records_mutex_);
    records_.drop(param(weight), passes);
  }
}

void KfacPlan::forget() {
  curvature_batches_.forget();
  records_.forget();
  for (Layer& layer : layers_) {
    layer.sums = nullptr;
  }
}

// ---- the step

bool KfacPlan::has_factors(size_t i) {
  const KFACParamState& state = state_of(i);
  if (!(factor_of_inputs(state).defined() || state.fisher_blocks().defined()) ||
      !state.factor_updates().defined()) {
    return false;
  }
  const auto* count = state.factor_updates().unsafeGetTensorImpl();
  if (with_factors_.count(count) != 0) {
    return true;
  }
  if (torchium::detail::is_capturing(device())) {
    return false;  // check_captured()
  }
  // A wait for a GPU, but only after a load or a skipped step.
  const bool result = state.factor_updates().item<double>() > 0.0;
  if (result) {
    with_factors_.insert(count);
  }
  return result;
}

void KfacPlan::check(const std::vector<size_t>& active) {
  require_curvature(active);
  check_sharing();
  for (const size_t i : active) {
    if (checked_[i]) {
      continue;
    }
    check_state(i);
    checked_[i] = true;
  }
}

// None: the weight falls back. is_free: parameters of the step that no layer has yet.
std::optional<KfacPlan::Layer> KfacPlan::layer_of(size_t i, const std::vector<bool>& is_free) {
  const FactorLayer* layer = records_.layer(param(i));
  if (layer == nullptr || !layer->problem.empty() || is_excluded(i)) {
    return std::nullopt;
  }
  int64_t bias = position(layer->bias);
  if (bias >= 0 && is_excluded(bias)) {
    return std::nullopt;
  }
  const KFACParamState& state = state_of(i);
  if (layer->is_unitwise ? factor_of_inputs(state).defined() : state.fisher_blocks().defined()) {
    return std::nullopt;  // was the weight of another kind of layer
  }
  const FactorLayout layout =
      layer->is_unitwise ? FactorLayout() : records_.layout(weight_of(i), *layer);
  FactorSums* sums = records_.sums(weight_of(i), is_shared());
  if (sums != nullptr &&
      !(layer->is_unitwise ? blocks_fit(*sums, state) : sums_fit(*sums, param(i), layout))) {
    sums = nullptr;  // from before the layer got or lost its bias
  }
  const bool known = has_factors(i);
  if (sums == nullptr && !known) {
    return std::nullopt;
  }
  const at::Tensor& blocks = known || sums == nullptr ? state.fisher_blocks() : sums->blocks;
  const bool has_room = layer->is_unitwise ? blocks.size(-1) == 2 : layout.has_bias_row;
  bias = bias >= 0 && is_free[bias] && has_room ? bias : -1;
  const int64_t cost = layer->is_unitwise ? 0
                                          : inversion_cost(layout.sizes_A(param(i))) +
                                                inversion_cost(layout.sizes_G(param(i)));
  return Layer{.weight = i,
               .bias = bias,
               .is_transposed = layer->is_transposed && param(i).dim() == 2,
               .is_unitwise = layer->is_unitwise,
               .sums = sums,
               .has_factors = known,
               .has_spare_row = !layer->is_unitwise && has_room && bias < 0,
               .cost = cost};
}

// The layers with factors, and those with sums for their first ones.
bool KfacPlan::derive(const std::vector<size_t>& active) {
  records_.settle_tables(is_shared());
  std::vector<bool> is_free(size(), false);
  for (const size_t i : active) {
    is_free[i] = true;
  }
  std::vector<Layer> found;
  for (const size_t i : active) {
    if (const auto layer = layer_of(i, is_free)) {
      found.push_back(*layer);
      is_free[i] = false;
      if (layer->bias >= 0) {
        is_free[layer->bias] = false;
      }
    }
  }
  new_fallback_.clear();
  for (const size_t i : active) {
    if (is_free[i] && warned_.count(param(i).unsafeGetTensorImpl()) == 0) {
      new_fallback_.push_back(static_cast<int64_t>(i));
    }
  }
  considered_ = static_cast<int64_t>(active.size());
  choose_owners(found);
  const bool is_new = found != layers_;
  layers_ = std::move(found);
  return is_new;
}

void KfacPlan::before_completing() {
  new_diagonals_.clear();
  only_creates_state_ = layers_.empty() && only_creates_state();
}

void KfacPlan::note_skip(const std::vector<at::Tensor>& params) {
  JointPlan::note_skip(params);
  for (const at::Tensor& param : params) {
    const int64_t i = position(param);
    if (i >= 0) {
      with_factors_.erase(state_of(i).factor_updates().unsafeGetTensorImpl());
      if (unconfirmed_.erase(param.unsafeGetTensorImpl()) != 0) {
        lost_inverses_.insert(param.unsafeGetTensorImpl());
      }
    }
  }
}

}  // namespace torchium::optim::detail
