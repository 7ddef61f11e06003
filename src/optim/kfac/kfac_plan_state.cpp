// The state of parameters in K-FAC's plan: what is needed, created, converted and checked.
#include "optim/kfac/kfac_plan.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <string_view>

namespace torchium::optim::detail {

void KfacPlan::make_room(SecondOrderParamState& fresh, const SecondOrderParamState& saved,
                         const at::Tensor& param, const torch::optim::OptimizerOptions& options,
                         int64_t /*params*/, const std::string& /*name*/) const {
  add_saved_layout(static_cast<KFACParamState&>(fresh), param,
                   static_cast<const KFACParamState&>(saved), own_options(options));
}

// Of a norm.
void KfacPlan::check_fisher_blocks(size_t i) const {
  const KFACParamState& state = state_of(i);
  TORCH_CHECK_VALUE(state.factor_updates().defined(), "the state of ", name(i),
                    " has lost 'factor_updates'; delete all of it to start afresh");
  TORCH_CHECK_VALUE(state.fisher_blocks().size(0) == param(i).numel(), name(i),
                    " has got another shape since its fisher_blocks ",
                    state.fisher_blocks().sizes(), " were made; delete its state to start afresh");
}

// It has all that its solver needs, and nothing of the other kind of solver.
void KfacPlan::check_state(size_t i) const {
  const KFACParamState& state = state_of(i);
  const bool has_roots = is_inverse_free(options(i));
  const auto members = const_cast<KFACParamState&>(state).factors();  // nothing is written here
  if (std::ranges::none_of(members, [](const auto& each) { return each.second->defined(); })) {
    return;
  }
  if (state.fisher_blocks().defined()) {
    check_fisher_blocks(i);
    return;
  }
  const auto& others = has_roots ? state.A() : state.K();
  TORCH_CHECK_VALUE(!others.defined(), "the state of ", name(i), " has the ",
                    has_roots ? "factors A and G" : "roots K and C", ", which solver='",
                    options(i).solver(), "' does not keep; delete all of it to start afresh");
  const std::string_view kept = has_roots ? "KC" : "AG";
  for (const auto& [key, tensor] : members) {
    const bool is_needed = key == "factor_updates" || key == "root_failures" ||
                           (key.size() == 1 && kept.find(key) != kept.npos);
    TORCH_CHECK_VALUE(!is_needed || tensor->defined(), "the state of ", name(i), " has lost '", key,
                      "'; delete all of it to start afresh");
  }
  const at::Tensor& A = factor_of_inputs(state);
  const at::Tensor& G = factor_of_gradients(state);
  TORCH_CHECK_VALUE(factors_fit(param(i), A, G), name(i),
                    " has got another shape since its factors ", kept.substr(0, 1), " ", A.sizes(),
                    " and ", kept.substr(1), " ", G.sizes(),
                    " were made; delete its state to start afresh");
}

void KfacPlan::complete(size_t i, SecondOrderParamState& completed) {
  auto& state = static_cast<KFACParamState&>(completed);
  if (options(i).momentum() > 0.0 && !state.momentum_buffer().defined()) {
    state.momentum_buffer(parameter_shaped_zeros(param(i)));
  }
  const auto layer = std::find_if(layers_.begin(), layers_.end(),
                                  [&](const Layer& each) { return each.weight == i; });
  const FactorLayer* known = records_.layer(param(i));
  const bool is_declared =
      only_creates_state_ && known != nullptr && known->problem.empty() && !is_excluded(i);
  if (layer == layers_.end() && !is_declared) {
    return;
  }
  if (known->is_unitwise) {
    if (!state.fisher_blocks().defined()) {
      const bool is_recorded = layer != layers_.end() && layer->sums != nullptr;
      add_fisher_blocks(state, param(i),
                        is_recorded ? layer->sums->blocks.size(-1) == 2 : known->bias.defined());
    }
    return;
  }
  const auto& split = options(i).damping_split();
  const FactorLayout layout = records_.layout(weight_of(i), *known);
  const bool is_new = !factor_of_inputs(state).defined();
  if (is_new) {
    add_factors(state, param(i), layout, options(i));
    note_diagonals(i, state, *known);
  }
  if (is_inverse_free(options(i))) {
    update_momenta(state, param(i), options(i));
    return;
  }
  if (layer != layers_.end() && !keeps_inverses(*layer)) {
    drop_roots(state);
  } else if (!is_new && !has_roots(state, split)) {
    reset_roots(state, param(i), layout, split);
    if (layer != layers_.end() && layer->has_factors) {
      lost_inverses_.insert(param(i).unsafeGetTensorImpl());
    }
  }
  const at::ScalarType dtype = factor_dtype_of(options(i), param(i));
  state.A(state.A().to(dtype)).G(state.G().to(dtype));
  if (!options(i).ekfac()) {
    state.second_moments({}).moment_updates({});
  } else if (!state.second_moments().defined()) {
    add_second_moments(state);
  }
}

// Of new factors those that are diagonals because of their orders.
void KfacPlan::note_diagonals(size_t i, const KFACParamState& state, const FactorLayer& layer) {
  const FactorStructures asked = structures_of(options(i));
  const auto note = [&](const char* key, const at::Tensor& factor, Structure structure) {
    if (factor.dim() == 2 && structure == Structure::kDense &&
        factor.size(1) > options(i).max_factor_size()) {
      new_diagonals_.push_back({i, key, factor.size(1)});
    }
  };
  note("A", factor_of_inputs(state), asked.A);
  if (!layer.is_table) {  // whose G is exact
    note("G", factor_of_gradients(state), asked.G);
  }
}

// State may have been replaced.
void KfacPlan::check_layer(const Layer& layer) const {
  const at::Tensor& weight = param(layer.weight);
  if (layer.bias >= 0) {
    const at::Tensor& bias = param(layer.bias);
    const bool fits =
        layer.is_unitwise
            ? bias.sizes() == weight.sizes()
            : bias.dim() == 1 && bias.size(0) == weight.size(layer.is_transposed ? 1 : 0);
    TORCH_CHECK_VALUE(fits && state_dtype(bias) == state_dtype(weight), name(layer.bias), " is ",
                      bias.toString(), bias.sizes(), ", which does not fit its weight, ",
                      name(layer.weight), ", of type ", weight.toString());
  }
  auto state = state_of(layer.weight);
  KFACParamState expected;
  add_saved_layout(expected, at::empty_like(weight, at::kMeta), state, options(layer.weight));
  if (!keeps_inverses(layer)) {
    drop_roots(expected);
  }
  const auto found = state.factors();
  const auto needed = expected.factors();
  for (const auto k : c10::irange(needed.size())) {
    const at::Tensor& tensor = *found[k].second;
    const at::Tensor& like = *needed[k].second;
    TORCH_CHECK_VALUE(!like.defined() || (tensor.defined() && tensor.sizes() == like.sizes() &&
                                          tensor.scalar_type() == like.scalar_type() &&
                                          tensor.device() == weight.device()),
                      "'", needed[k].first, "' of ", name(layer.weight), " must be ",
                      like.scalar_type(), like.sizes(), " on ", weight.device(), ", got ",
                      tensor.toString(), tensor.defined() ? tensor.sizes() : at::IntArrayRef());
  }
}

}  // namespace torchium::optim::detail
