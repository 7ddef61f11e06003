#include "torchium/optim/kfac.h"

#include "gradients/model_layers.h"
#include "optim/factor_capture.h"
#include "optim/group_step.h"
#include "optim/joint_step.h"
#include "optim/kfac_step.h"
#include "optim/option_checks.h"
#include "optim/option_fields.h"
#include "optim/state_checks.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torchium::optim {

namespace detail {

// A weight of a step that is preconditioned, and the bias that shares its factors.
struct PreconditionedLayer {
  int64_t weight;    // positions in the step
  int64_t bias;      // -1: none
  FactorSums* sums;  // null: the factors stay
  bool inverse_due;
};

}  // namespace detail

namespace {

using Parameters = std::unordered_set<const at::TensorImpl*>;

const KFACOptions& kfac_options(const torch::optim::OptimizerOptions& options) {
  const auto* result = dynamic_cast<const KFACOptions*>(&options);
  TORCH_CHECK_VALUE(result != nullptr, "a parameter group of KFAC needs KFACOptions");
  return *result;
}

// The members of a state as the core takes them, and back.
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

void add_factors(KFACParamState& state, const at::Tensor& weight, bool has_bias, int64_t groups,
                 const std::string& damping_split) {
  const auto split = detail::parse_damping_split(damping_split);
  const auto layer = detail::kfac_init_state(weight, has_bias, groups, split);
  state.A(layer.A).G(layer.G);
  state.factor_updates(layer.factor_updates).root_failures(layer.root_failures);
  if (split == detail::DampingSplit::kExact) {
    state.A_eigenvectors(layer.A_root).G_eigenvectors(layer.G_root);
    state.A_eigenvalues(layer.A_eigenvalues).G_eigenvalues(layer.G_eigenvalues);
  } else {
    state.A_inverse(layer.A_root).G_inverse(layer.G_root);
  }
}

int64_t fan_in(const at::Tensor& weight) {
  return weight.size(0) == 0 ? 0 : weight.numel() / weight.size(0);
}

}  // namespace

// What is not state: it is found out again after a load.
struct KFAC::Notes {
  Parameters with_factors;  // as far as the host knows
  Parameters fallback;      // in their last step
  Parameters warned;
};

KFACOptions::KFACOptions(double lr) : lr_(lr) {}

double KFACOptions::get_lr() const { return lr(); }
void KFACOptions::set_lr(const double lr) { this->lr(lr); }

void KFACOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(archive, *this);
}
void KFACOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(archive, *this);
}

bool operator==(const KFACOptions& lhs, const KFACOptions& rhs) {
  return detail::equal_options(lhs, rhs);
}

std::unique_ptr<torch::optim::OptimizerParamState> KFACParamState::clone() const {
  return std::make_unique<KFACParamState>(*this);
}

std::vector<SecondOrderParamState::NamedTensor> KFACParamState::parameter_shaped() {
  return {{"momentum_buffer", &momentum_buffer()}};
}

std::vector<SecondOrderParamState::NamedTensor> KFACParamState::factors() {
  return {{"A", &A()},
          {"G", &G()},
          {"A_inverse", &A_inverse()},
          {"G_inverse", &G_inverse()},
          {"A_eigenvectors", &A_eigenvectors()},
          {"G_eigenvectors", &G_eigenvectors()},
          {"A_eigenvalues", &A_eigenvalues()},
          {"G_eigenvalues", &G_eigenvalues()},
          {"factor_updates", &factor_updates()},
          {"root_failures", &root_failures()}};
}

std::vector<std::pair<std::string, at::Tensor>> KFACParamState::tensors() const {
  auto result = SecondOrderParamState::tensors();
  // factors() gives addresses for writing too; nothing is written here.
  for (const auto& [key, tensor] : const_cast<KFACParamState*>(this)->factors()) {
    if (tensor->defined()) {
      result.emplace_back(key, *tensor);
    }
  }
  return result;
}

void KFACParamState::serialize(torch::serialize::InputArchive& archive) {
  SecondOrderParamState::serialize(archive);
  for (const auto& [key, tensor] : factors()) {
    archive.try_read(key, *tensor, /*is_buffer=*/true);
  }
}

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
  const auto& o = kfac_options(options);
  detail::check_at_least_zero("lr", o.lr());
  detail::check_rate("momentum", o.momentum(), /*one_allowed=*/false);
  detail::check_at_least_zero("weight_decay", o.weight_decay());
  detail::check_at_least_zero("damping", o.damping());
  detail::check_at_least_one("TCov", o.TCov());
  detail::check_at_least_one("TInv", o.TInv());
  detail::check_at_least_zero("eps", o.eps());
  detail::check_rate("stat_decay", o.stat_decay(), /*one_allowed=*/true);
  detail::check_positive_or_none("kl_clip", o.kl_clip());
  detail::check_choice("damping_split", o.damping_split(), {"pi", "plain", "exact"});
}

void KFAC::check_together(const std::vector<const Options*>& groups) const {
  detail::check_equal_in_all<KFACOptions>("KFAC", groups,
                                          {"batch_averaged", "kl_clip", "damping_split"});
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
  for (const auto& group : param_groups_) {
    for (const auto& param : group.params()) {
      const auto* place = layers().find(param);
      if (place == nullptr || !place->samples_are_hidden) {
        watched.push_back(param);
        TCovs.push_back(kfac_options(group.options()).TCov());
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
  capture_->set_due(due);
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

// The layers that have factors, or get their first ones.
std::vector<detail::PreconditionedLayer> KFAC::find_layers(const detail::JointStep& step) {
  std::vector<detail::PreconditionedLayer> found;
  const auto steps = steps_taken(step.params);
  for (const auto i : c10::irange(step.params.size())) {
    const at::Tensor& weight = step.params[i];
    const detail::FactorLayer* layer = capture_->layer(weight);
    if (layer == nullptr || layer->is_embedding) {
      continue;
    }
    detail::FactorSums* sums = capture_->sums(weight);
    const bool known = has_factors(weight);
    if (sums == nullptr && !known) {
      continue;
    }
    const bool due = steps[i] % kfac_options(*step.options[i]).TInv() == 0;
    found.push_back({static_cast<int64_t>(i), step.position(layer->bias), sums, due || !known});
  }
  return found;
}

std::string KFAC::why_not(const at::Tensor& param) const {
  const auto* place = layers().find(param);
  const detail::FactorLayer* layer = capture_->layer(param);
  if (place != nullptr && !place->problem.empty()) {
    return place->module + " " + place->problem;
  }
  if (layer != nullptr && layer->is_embedding) {
    return "used by an embedding";
  }
  return "not seen as the weight or bias of a linear layer or convolution";
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
  std::string names;
  for (const auto i : c10::irange(step.params.size())) {
    const auto* impl = step.params[i].unsafeGetTensorImpl();
    if (done[i]) {
      notes_->fallback.erase(impl);
      continue;
    }
    notes_->fallback.insert(impl);
    if (notes_->warned.insert(impl).second) {
      names += (names.empty() ? "" : ", ") + name_of(step.params[i]) + " (" +
               why_not(step.params[i]) + ")";
    }
  }
  if (!names.empty()) {
    TORCH_WARN("KFAC takes steps of SGD with momentum for parameters that it cannot precondition: ",
               names);
  }
}

void KFAC::create_states(const detail::JointStep& step,
                         const std::vector<detail::PreconditionedLayer>& layers) {
  for (const auto i : c10::irange(step.params.size())) {
    const at::Tensor& param = step.params[i];
    if (find_state(param) == nullptr) {
      add_state(param, make_empty_state());
    }
    at::Tensor& buffer = state_of(param)->momentum_buffer();
    if (kfac_options(*step.options[i]).momentum() > 0.0 && !buffer.defined()) {
      buffer = detail::parameter_shaped_zeros(param);
    }
  }
  for (const auto& layer : layers) {
    const at::Tensor& weight = step.params[layer.weight];
    KFACParamState& state = *state_of(weight);
    if (!state.A().defined()) {
      const detail::FactorLayer& seen = *capture_->layer(weight);
      add_factors(state, weight, seen.has_bias_row, seen.groups,
                  kfac_options(*step.options[layer.weight]).damping_split());
    }
  }
}

void KFAC::take_joint_step(const detail::JointStep& joint) {
  capture_->raise_error();
  const auto found = find_layers(joint);
  note_fallback(joint, found);
  create_states(joint, found);

  detail::GroupStep step = begin_call(0, joint.params);
  const auto& shared = kfac_options(*joint.options.front());
  detail::KfacHyperparameters h;
  h.batch_averaged = shared.batch_averaged();
  h.kl_clip = shared.kl_clip();
  h.damping_split = detail::parse_damping_split(shared.damping_split());
  for (const auto i : c10::irange(joint.params.size())) {
    const auto& o = kfac_options(*joint.options[i]);
    h.parameters.push_back({joint.lrs[i], o.momentum(), o.weight_decay(), o.maximize()});
  }
  std::vector<detail::KfacLayer> layers;
  for (const auto& entry : found) {
    const auto& o = kfac_options(*joint.options[entry.weight]);
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
    layer.damping = o.damping();
    layer.stat_decay = o.stat_decay();
    layer.floor = o.eps();
    layers.push_back(std::move(layer));
  }
  detail::KfacState state;
  state.steps = detail::member_list(step.states, &SecondOrderParamState::step);
  state.momentum_buffers = detail::member_list(step.states, &KFACParamState::momentum_buffer);
  state.status = step.status;
  detail::kfac_step(h, step.params, step.grads, layers, state);
  if (!step.status.is_cpu()) {  // on the CPU a skipped step is known at once
    for (const auto& entry : found) {
      notes_->with_factors.insert(joint.params[entry.weight].unsafeGetTensorImpl());
    }
  }
  finish_step(0, step);
}

KFACReport KFAC::report() const {
  KFACReport report;
  for (const auto& param : all_params()) {
    if (find_state(param) != nullptr) {
      const bool falls_back = notes_->fallback.count(param.unsafeGetTensorImpl()) != 0;
      (falls_back ? report.fallback : report.preconditioned).push_back(name_of(param));
    }
  }
  return report;
}

// ---- checkpoints

void KFAC::fit_loaded(const Options& options, const std::vector<at::Tensor>& params,
                      const std::vector<SecondOrderParamState*>& loaded,
                      const std::vector<SecondOrderParamState*>& fitted) const {
  for (const auto i : c10::irange(params.size())) {
    const at::Tensor& weight = params[i];
    auto& source = static_cast<KFACParamState&>(*loaded[i]);
    auto& target = static_cast<KFACParamState&>(*fitted[i]);
    if (!source.A().defined() || weight.dim() < 2) {
      continue;
    }
    // The order of A tells whether it has a row for a bias.
    const bool has_stack =
        source.A().dim() == 3 && source.A().size(0) > 0 && weight.size(0) % source.A().size(0) == 0;
    const int64_t groups = has_stack ? source.A().size(0) : 1;
    const bool has_bias_row = source.A().size(-1) == fan_in(weight) + 1;
    add_factors(target, weight, has_bias_row, groups, kfac_options(options).damping_split());
    const auto sources = source.factors();
    const auto targets = target.factors();
    for (const auto k : c10::irange(targets.size())) {
      const auto& [key, tensor] = targets[k];
      if (tensor->defined()) {
        TORCH_CHECK_VALUE(sources[k].second->defined(), "the archive has no ", key, " of ",
                          describe(weight));
        detail::check_fits(*sources[k].second, *tensor, key, describe(weight));
        tensor->copy_(*sources[k].second);
      }
    }
  }
}

// Which bias shares the factors of which weight: rows of two positions in all_params(), -1 for
// none.
void KFAC::save_more(torch::serialize::OutputArchive& archive) const {
  const auto params = all_params();
  const auto position = [&](const at::Tensor& param) -> int64_t {
    const auto found = std::find_if(params.begin(), params.end(),
                                    [&](const auto& other) { return other.is_same(param); });
    return found == params.end() ? -1 : found - params.begin();
  };
  std::vector<int64_t> rows;
  for (const auto i : c10::irange(params.size())) {
    KFACParamState* state = state_of(params[i]);
    const auto* layer = capture_->layer(params[i]);
    if (state != nullptr && state->A().defined() && layer != nullptr) {
      rows.insert(rows.end(), {static_cast<int64_t>(i), position(layer->bias)});
    }
  }
  archive.write("layers", at::tensor(rows, at::kLong).view({-1, 2}), /*is_buffer=*/true);
}

std::function<void()> KFAC::read_more(torch::serialize::InputArchive& archive) {
  at::Tensor rows;
  TORCH_CHECK_VALUE(archive.try_read("layers", rows, /*is_buffer=*/true),
                    "the archive has no entry 'layers'; it was not written by KFAC");
  const auto params = all_params();
  const auto count = static_cast<int64_t>(params.size());
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kLong && rows.dim() == 2 && rows.size(1) == 2 &&
                        (rows < count).all().item<bool>() && (rows >= -1).all().item<bool>() &&
                        (rows.select(1, 0) >= 0).all().item<bool>(),
                    "the entry 'layers' of the archive does not fit the optimizer's ", count,
                    " parameters");
  return [this, rows, params] {
    *notes_ = Notes();
    capture_->forget_layers();
    for (const auto i : c10::irange(rows.size(0))) {
      const at::Tensor& weight = params[rows[i][0].item<int64_t>()];
      const auto bias = rows[i][1].item<int64_t>();
      const KFACParamState* state = state_of(weight);
      if (state != nullptr && state->A().defined()) {
        detail::FactorLayer layer;
        layer.bias = bias >= 0 ? params[bias] : at::Tensor();
        layer.has_bias_row = state->A().size(-1) == fan_in(weight) + 1;
        layer.groups = state->A().size(0);
        capture_->set_layer(weight, std::move(layer));
      }
    }
    forget_captures();
  };
}

}  // namespace torchium::optim
