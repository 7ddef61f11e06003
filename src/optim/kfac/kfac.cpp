#include "torchium/optim/kfac.h"

#include "gradients/capture/model_layers.h"
#include "optim/core/schedules.h"
#include "optim/kfac/fallback_reasons.h"
#include "optim/kfac/kfac_options.h"
#include "optim/kfac/kfac_plan.h"
#include "optim/kfac/skipped_layers.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

namespace torchium::optim {
namespace {

// Whether the parameter is the bias of a module whose weight is frozen.
bool is_beside_frozen_weight(const gradients::detail::ModelLayers& layers,
                             const gradients::detail::ParameterPlace& place) {
  const auto params = layers.parameters();
  return place.name.ends_with("bias") &&
         std::any_of(params.begin(), params.end(), [&](const auto& entry) {
           const auto& [param, other] = entry;
           return other->module == place.module && other->name.ends_with("weight") &&
                  !param.requires_grad();
         });
}

// "encoder.0" of "encoder.0.weight"
std::string layer_name(const gradients::detail::ParameterPlace& place) {
  const size_t end = place.name.rfind('.');
  return end == std::string::npos ? "" : place.name.substr(0, end);
}

}  // namespace

KFAC::KFAC(const torch::nn::Module& model, KFACOptions defaults)
    : CapturingOptimizer(model, std::make_unique<KFACOptions>(std::move(defaults))) {
  initialize_with_model();
}

KFAC::KFAC(const torch::nn::Module& model,
           const std::vector<torch::optim::OptimizerParamGroup>& param_groups, KFACOptions defaults)
    : CapturingOptimizer(model, std::make_unique<KFACOptions>(std::move(defaults))) {
  initialize(param_groups);
}

KFAC::KFAC(const torch::nn::Module& model, std::unique_ptr<Options> defaults)
    : CapturingOptimizer(model, std::move(defaults)) {}

KFAC::~KFAC() = default;
KFAC::KFAC(KFAC&&) noexcept = default;
KFAC& KFAC::operator=(KFAC&&) noexcept = default;

void KFAC::follow_schedules() {
  detail::follow_schedules<KFACOptions>(name(), param_groups_, [&] { return next_steps(); });
}

void KFAC::check_together(const std::vector<const Options*>& groups) const {
  SecondOrderOptimizer::check_together(groups);
  // follow_schedules() compares the values of functions, which a new group does not have yet.
  detail::check_same_in_all<KFACOptions>("KFAC", groups, /*compares_functions=*/false);
  check_as_in_defaults<KFACOptions>(defaults(), groups);
  for (const auto g : c10::irange(groups.size())) {
    const auto& options = detail::options_as<KFACOptions>(*groups[g], "KFAC");
    TORCH_CHECK_VALUE(
        !options.adaptive_damping() || options.schedules().count("damping") == 0,
        "damping of group ", g,
        " is a function of the step, which adaptive_damping=True cannot change; pass a number to ",
        "start from, or adaptive_damping=False");
    TORCH_CHECK_VALUE(!options.capturable() || options.schedules().empty(), "an option of group ",
                      g, " is a function of the step, which a captured step cannot follow; pass a ",
                      "number, or capturable=False");
  }
}

std::unique_ptr<SecondOrderParamState> KFAC::make_empty_state() const {
  return std::make_unique<KFACParamState>();
}

KFACParamState* KFAC::state_of(const at::Tensor& param) const {
  return static_cast<KFACParamState*>(find_state(param));
}

c10::intrusive_ptr<detail::JointPlan> KFAC::make_plan() const {
  auto plan = c10::make_intrusive<detail::KfacPlan>();
  plan->set_grad_worker_fraction(
      detail::options_as<KFACOptions>(defaults(), name()).grad_worker_fraction());
  return plan;
}

std::optional<KFAC::StateMap> KFAC::whole_state() const {
  if (!plan().has_parts()) {
    return std::nullopt;
  }
  const auto params = all_params();
  std::vector<const KFACParamState*> states;
  for (const at::Tensor& param : params) {
    states.push_back(state_of(param));
  }
  auto all = plan().whole_states(states);
  StateMap whole;
  for (const auto i : c10::irange(params.size())) {
    if (all[i] != nullptr) {
      whole[params[i].unsafeGetTensorImpl()] = std::move(all[i]);
    }
  }
  return whole;
}

detail::KfacPlan& KFAC::plan() const { return static_cast<detail::KfacPlan&>(joint_plan()); }

std::vector<std::string> KFAC::skip_layers_of(const Options& options) const {
  return detail::options_as<KFACOptions>(options, "KFAC").skip_layers();
}

bool KFAC::is_skipped(const at::Tensor& param) const {
  const auto* place = layers().find(param);
  return place != nullptr &&
         detail::is_skipped_layer(skip_layers_of(defaults()), layer_name(*place), place->type);
}

bool KFAC::is_watched(const at::Tensor& param) const {
  const auto* place = layers().find(param);
  const bool is_hidden =
      place != nullptr && place->samples == gradients::detail::SampleDimension::kHidden;
  return !is_hidden && !is_skipped(param);
}

bool KFAC::captures_next() {
  const auto& due = plan().due();
  return std::find(due.begin(), due.end(), true) != due.end();
}

void KFAC::update_preconditioners() {
  refuse_moved_from();
  try {
    adopt_groups();
  } catch (...) {
    plan().withdraw();
    throw;
  }
  plan().update_preconditioners();
  read_reports(/*wait=*/false);
}

double KFAC::update_damping(double loss_before, double loss_after) {
  refuse_moved_from();
  const bool is_scheduled = std::ranges::any_of(param_groups_, [](const auto& group) {
    const auto* options = dynamic_cast<const KFACOptions*>(&group.options());
    return options != nullptr && options->schedules().count("damping") != 0;
  });
  if (is_scheduled) {
    plan().withdraw();
  }
  TORCH_CHECK_VALUE(!is_scheduled,
                    "damping is a function of the step, which update_damping() cannot change; "
                    "pass a number to start from");
  const auto [ratio, factor] = plan().damping_update(loss_before, loss_after);
  for (auto& group : param_groups_) {
    auto& options = static_cast<KFACOptions&>(group.options());
    options.damping(options.damping() * factor);
  }
  return ratio;
}

// ---- warnings and reports

std::string KFAC::why_not(const at::Tensor& param) const {
  const auto* place = layers().find(param);
  const detail::FactorRecords& records = plan().records();
  const detail::FactorLayer* layer = records.layer(param);
  if (is_skipped(param)) {
    return detail::fallback_reason("skipped", "");
  }
  if (place != nullptr && place->is_unsupported) {
    const bool is_recurrent = place->samples == gradients::detail::SampleDimension::kHidden;
    return detail::fallback_reason(is_recurrent ? "recurrent" : "layer", place->type);
  }
  if (place != nullptr && !place->problem.empty()) {
    return place->type + " " + place->problem;
  }
  if (layer != nullptr && !layer->problem.empty()) {
    return layer->problem;
  }
  if (place != nullptr && is_beside_frozen_weight(layers(), *place)) {
    return detail::fallback_reason("frozen", "");
  }
  if (is_used_otherwise(param) || (layer != nullptr && is_used_otherwise(layer->bias))) {
    return detail::kUsedOutside;
  }
  if (records.is_joint_bias(param)) {
    return detail::fallback_reason("of_weight", "");
  }
  if (records.is_lone_bias(param)) {
    return detail::kLoneBias;
  }
  if (plan().needs_curvature(param)) {
    return detail::kNoCurvature;
  }
  return detail::fallback_reason("not_seen", place == nullptr ? "the model" : place->type);
}

// Entries of skip_layers that match no layer of the model, once.
void KFAC::announce_unmatched_skips() const {
  const auto patterns = skip_layers_of(defaults());
  if (patterns.empty() || plan().has_compared_skips()) {
    return;
  }
  std::vector<std::string> unmatched, described;
  std::set<std::pair<std::string, std::string>> known;
  for (const auto& [param, place] : layers().parameters()) {
    const std::string name = layer_name(*place);
    if (known.emplace(name, place->type).second) {
      described.push_back(c10::str("'", name, "' (", place->type, ")"));
    }
  }
  for (const std::string& pattern : patterns) {
    if (std::ranges::none_of(known, [&](const auto& layer) {
          return detail::is_skipped_layer({pattern}, layer.first, layer.second);
        })) {
      unmatched.push_back("'" + pattern + "'");
    }
  }
  if (!unmatched.empty()) {
    TORCH_WARN(detail::unmatched_skips_warning(name(), unmatched, described));
  }
}

void KFAC::announce() {
  announce_unmatched_skips();
  if (!plan().has_warnings()) {
    return;
  }
  detail::NamesByKind fallback;
  for (const int64_t i : plan().new_fallback()) {
    const at::Tensor& param = plan().param(i);
    fallback[why_not(param)].push_back(name_of(param));
  }
  if (!fallback.empty()) {
    TORCH_WARN(plan().fallback_warning(name(), fallback));
  }
  std::vector<std::string> names;
  for (const auto i : c10::irange(plan().size())) {
    names.push_back(name_of(plan().param(i)));
  }
  for (const std::string& warning : plan().new_warnings(name(), names)) {
    TORCH_WARN(warning);
  }
}

KFACReport KFAC::report() const {
  refuse_moved_from();
  const auto params = all_params();
  std::vector<std::string> names, reasons(params.size());
  for (const at::Tensor& param : params) {
    names.push_back(name_of(param));
  }
  for (const int64_t i : plan().fallback()) {
    reasons.at(i) = why_not(plan().param(i));
  }
  return plan().report(params, names, tensors_of_states(), reasons);
}

}  // namespace torchium::optim
