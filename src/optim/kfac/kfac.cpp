#include "torchium/optim/kfac.h"

#include "gradients/capture/model_layers.h"
#include "optim/capture/factor_capture.h"
#include "optim/core/group_step.h"
#include "optim/core/joint_step.h"
#include "optim/kfac/kfac_options.h"
#include "optim/kfac/kfac_parts.h"
#include "optim/kfac/kfac_step.h"
#include "optim/reports/message_summary.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::optim {

namespace detail {

// A weight of a step that is preconditioned, and the bias that shares its factors.
struct PreconditionedLayer {
  int64_t weight;    // positions in the step
  int64_t bias;      // -1: none
  FactorSums* sums;  // null: the factors stay
  bool inverse_due;
  bool inverse_lost;  // there are factors, but another damping_split has made the inverse
};

}  // namespace detail

namespace {

// The members of a state as the core takes them.
detail::KfacLayer core_layer(KFACParamState& state) {
  const bool exact = state.A_eigenvectors().defined();
  detail::KfacLayer layer;
  layer.A = state.A();
  layer.G = state.G();
  layer.A_root = exact ? state.A_eigenvectors() : state.A_inverse();
  layer.G_root = exact ? state.G_eigenvectors() : state.G_inverse();
  layer.A_eigenvalues = state.A_eigenvalues();
  layer.G_eigenvalues = state.G_eigenvalues();
  layer.factor_updates = state.factor_updates();
  layer.root_failures = state.root_failures();
  return layer;
}

}  // namespace

KFAC::KFAC(const torch::nn::Module& model, KFACOptions defaults)
    : CapturingOptimizer(model, std::make_unique<KFACOptions>(std::move(defaults))),
      capture_(std::make_unique<detail::FactorCapture>()),
      notes_(std::make_unique<Notes>()) {
  initialize_with_model();
}

KFAC::KFAC(const torch::nn::Module& model,
           const std::vector<torch::optim::OptimizerParamGroup>& param_groups, KFACOptions defaults)
    : CapturingOptimizer(model, std::make_unique<KFACOptions>(std::move(defaults))),
      capture_(std::make_unique<detail::FactorCapture>()),
      notes_(std::make_unique<Notes>()) {
  initialize(param_groups);
}

KFAC::~KFAC() = default;
KFAC::KFAC(KFAC&&) noexcept = default;
KFAC& KFAC::operator=(KFAC&&) noexcept = default;

void KFAC::check_options(const Options& options) const {
  detail::check_options(detail::kfac_options(options));
}

void KFAC::check_together(const std::vector<const Options*>& groups) const {
  detail::check_same_in_all<KFACOptions>("KFAC", groups);
}

std::unique_ptr<SecondOrderParamState> KFAC::make_empty_state() const {
  return std::make_unique<KFACParamState>();
}

KFACParamState* KFAC::state_of(const at::Tensor& param) const {
  return static_cast<KFACParamState*>(find_state(param));
}

// ---- capture

void KFAC::forget_captures() {
  std::vector<at::Tensor> watched;
  std::vector<int64_t> TCovs;
  std::vector<int64_t> max_factor_sizes;
  for (const auto& group : param_groups_) {
    for (const auto& param : group.params()) {
      const auto* place = layers().find(param);
      if (place == nullptr || !place->samples_are_hidden) {
        watched.push_back(param);
        const auto& o = detail::kfac_options(group.options());
        TCovs.push_back(o.TCov());
        max_factor_sizes.push_back(o.max_factor_size());
      }
    }
  }
  const auto steps = steps_taken(watched);
  std::vector<bool> due;
  for (const auto i : c10::irange(watched.size())) {
    due.push_back(watched[i].dim() >= 2 && steps[i] % TCovs[i] == 0);
  }
  capture_->watch(watched);
  capture_->forget();
  capture_->set_due(due, max_factor_sizes);
}

bool KFAC::has_factors(const at::Tensor& weight) const {
  const auto* impl = weight.unsafeGetTensorImpl();
  if (notes_->with_factors.count(impl) != 0) {
    return true;
  }
  // A wait for a GPU, but only after a load or a skipped step.
  KFACParamState* state = state_of(weight);
  const bool result = state != nullptr && state->factor_updates().defined() &&
                      state->factor_updates().item<float>() > 0.0F;
  if (result) {
    notes_->with_factors.insert(impl);
  }
  return result;
}

void KFAC::note_skip(const std::vector<at::Tensor>& params) {
  for (const auto& param : params) {
    notes_->with_factors.erase(param.unsafeGetTensorImpl());
  }
}

// ---- the step

const char* KFAC::root_remedy() const {
  return "raise damping, set root_method to 'eigh', or clip gradients so large that factors "
         "overflow";
}

// The layers that have factors, or get their first ones.
std::vector<detail::PreconditionedLayer> KFAC::find_layers(const detail::JointStep& step) {
  std::vector<detail::PreconditionedLayer> found;
  const auto steps = steps_taken(step.params);
  for (const auto i : c10::irange(step.params.size())) {
    const at::Tensor& weight = step.params[i];
    const detail::FactorLayer* layer = capture_->layer(weight);
    if (layer == nullptr || !layer->problem.empty() || capture_->is_used_otherwise(weight) ||
        capture_->is_used_otherwise(layer->bias)) {
      continue;
    }
    detail::FactorSums* sums = capture_->sums(weight);
    const bool known = has_factors(weight);
    if (sums == nullptr && !known) {
      continue;
    }
    const auto& options = detail::kfac_options(*step.options[i]);
    const bool due = !known || steps[i] % options.TInv() == 0;
    const bool lost = known && !detail::has_roots(*state_of(weight), options.damping_split());
    found.push_back({static_cast<int64_t>(i), step.position(layer->bias), sums, due, lost});
  }
  return found;
}

std::string KFAC::why_not(const at::Tensor& param) const {
  const auto* place = layers().find(param);
  const detail::FactorLayer* layer = capture_->layer(param);
  if (place != nullptr && !place->problem.empty()) {
    return place->type + " " + place->problem;
  }
  if (layer != nullptr && !layer->problem.empty()) {
    return layer->problem;
  }
  if (capture_->is_only_looked_up(param)) {
    return "looked up as an embedding";
  }
  if (capture_->is_used_otherwise(param) ||
      (layer != nullptr && capture_->is_used_otherwise(layer->bias))) {
    return "also used otherwise than by a linear layer or convolution";
  }
  if (capture_->is_joint_bias(param)) {
    return "the bias of a weight that falls back";
  }
  return "not seen as weight or bias of a linear layer or convolution";
}

// Keeps the parameters that no factors precondition for report(), and warns of new ones.
void KFAC::note_fallback(const detail::JointStep& step,
                         const std::vector<detail::PreconditionedLayer>& layers) {
  std::vector<bool> done(step.params.size(), false);
  for (const auto& layer : layers) {
    done[layer.weight] = true;
    if (layer.bias >= 0) {
      done[layer.bias] = true;
    }
  }
  detail::NamesByKind names;
  for (const auto i : c10::irange(step.params.size())) {
    const auto* impl = step.params[i].unsafeGetTensorImpl();
    if (done[i]) {
      notes_->fallback.erase(impl);
      continue;
    }
    notes_->fallback.insert(impl);
    if (notes_->warned.insert(impl).second) {
      names[why_not(step.params[i])].push_back(name_of(step.params[i]));
    }
  }
  if (!names.empty()) {
    TORCH_WARN("KFAC preconditions ", std::count(done.begin(), done.end(), true), " of ",
               done.size(), " parameters. It takes steps of SGD with momentum for ",
               detail::summary(names),
               ". report() names all of them; a group with a larger lr or another optimizer may "
               "suit them better");
  }
}

// Refuses state of parameters that have got another shape, before anything is changed.
void KFAC::check_states(const detail::JointStep& step) const {
  for (const auto& param : step.params) {
    KFACParamState* state = state_of(param);
    if (state == nullptr) {
      continue;
    }
    check_shapes(param, *state);
    if (!state->A().defined()) {
      continue;
    }
    TORCH_CHECK_VALUE(detail::factors_fit(param, state->A(), state->G()), describe(param),
                      " has got another shape since its factors A ", state->A().sizes(), " and G ",
                      state->G().sizes(), " were made; erase it from state() to start afresh");
  }
}

void KFAC::create_states(const detail::JointStep& step,
                         const std::vector<detail::PreconditionedLayer>& layers) {
  for (const auto i : c10::irange(step.params.size())) {
    const at::Tensor& param = step.params[i];
    if (find_state(param) == nullptr) {
      add_state(param, make_empty_state());
    }
    if (!state_of(param)->is_of(param)) {
      state_of(param)->convert_to(param);
    }
    at::Tensor& buffer = state_of(param)->momentum_buffer();
    if (detail::kfac_options(*step.options[i]).momentum() > 0.0 && !buffer.defined()) {
      buffer = detail::parameter_shaped_zeros(param);
    }
  }
  detail::NamesByKind diagonal;
  for (const auto& layer : layers) {
    const at::Tensor& weight = step.params[layer.weight];
    KFACParamState& state = *state_of(weight);
    const auto& split = detail::kfac_options(*step.options[layer.weight]).damping_split();
    if (!state.A().defined()) {
      detail::add_factors(state, weight, *capture_->layer(weight), split);
      for (const auto& [name, factor] : {std::pair("A", state.A()), std::pair("G", state.G())}) {
        const auto& options = detail::kfac_options(*step.options[layer.weight]);
        if (factor.dim() == 2 && factor.size(-1) > options.max_factor_size()) {
          diagonal[c10::str("a factor ", name)].push_back(
              c10::str(name_of(weight), " (", factor.size(-1), ")"));
        }
      }
    } else if (!detail::has_roots(state, split)) {
      detail::reset_roots(state, weight, split);
    }
  }
  if (!diagonal.empty()) {
    TORCH_WARN("KFAC keeps only the diagonal of factors above max_factor_size: ",
               detail::summary(diagonal));
  }
}

void KFAC::take_joint_step(const detail::JointStep& joint) {
  capture_->raise_error();
  refuse_processes(capture_->processes());
  check_states(joint);
  const auto found = find_layers(joint);
  note_fallback(joint, found);
  create_states(joint, found);

  detail::GroupStep step = begin_call(0, joint.params);
  const auto& shared = detail::kfac_options(*joint.options.front());
  detail::KfacHyperparameters h;
  h.batch_averaged = shared.batch_averaged();
  h.kl_clip = shared.kl_clip();
  h.damping_split = detail::parse_damping_split(shared.damping_split());
  h.root_method = shared.root_method();
  for (const auto i : c10::irange(joint.params.size())) {
    const auto& o = detail::kfac_options(*joint.options[i]);
    h.parameters.push_back({joint.lrs[i], o.momentum(), o.weight_decay(), o.maximize()});
  }
  std::vector<detail::KfacLayer> layers;
  for (const auto& entry : found) {
    const auto& o = detail::kfac_options(*joint.options[entry.weight]);
    detail::KfacLayer layer = core_layer(*state_of(joint.params[entry.weight]));
    layer.weight = entry.weight;
    layer.bias = entry.bias;
    if (entry.sums != nullptr) {
      layer.A_sum = entry.sums->A;
      layer.G_sum = entry.sums->G;
      layer.samples = entry.sums->samples();
      layer.rows = entry.sums->rows;
    }
    layer.inverse_due = entry.inverse_due;
    layer.inverse_lost = entry.inverse_lost;
    layer.damping = o.damping();
    layer.stat_decay = o.stat_decay();
    layer.floor = o.eps();
    layers.push_back(std::move(layer));
  }
  detail::KfacState state;
  state.steps = detail::member_list(step.states, &SecondOrderParamState::step);
  state.momentum_buffers = detail::member_list(step.states, &KFACParamState::momentum_buffer);
  state.status = step.status;
  auto params = step.params;
  auto grads = step.grads;
  for (const auto& entry : found) {  // the core takes weights as [out, ...]
    const auto* layer = capture_->layer(params[entry.weight]);
    for (auto* tensors : {&grads, &state.momentum_buffers, &params}) {
      at::Tensor& tensor = (*tensors)[entry.weight];
      tensor = tensor.defined() ? layer->matrix(tensor) : tensor;
    }
  }
  detail::kfac_step(h, params, grads, layers, state);
  if (!step.status.is_cpu()) {  // on the CPU a skipped step is known at once
    for (const auto& entry : found) {
      notes_->with_factors.insert(joint.params[entry.weight].unsafeGetTensorImpl());
    }
  }
  finish_step(0, step);
}

KFACReport KFAC::report() const {
  refuse_moved_from();
  KFACReport report;
  for (const auto& param : all_params()) {
    if (find_state(param) != nullptr) {
      const bool falls_back = notes_->fallback.count(param.unsafeGetTensorImpl()) != 0;
      (falls_back ? report.fallback : report.preconditioned).push_back(name_of(param));
      const KFACParamState& state = *state_of(param);
      if (state.A().defined() && state.A().dim() == 2) {
        report.diagonal_A.push_back(name_of(param));
      }
      if (state.G().defined() && state.G().dim() == 2) {
        report.diagonal_G.push_back(name_of(param));
      }
    }
  }
  return report;
}

}  // namespace torchium::optim
