#include "torchium/optim/natural_gradient.h"

#include "gradients/capture/model_layers.h"
#include "optim/capture/batch_capture.h"
#include "optim/capture/kept_batch_state.h"
#include "optim/core/group_step.h"
#include "optim/core/joint_step.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "optim/natural_gradient/natural_gradient_step.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::optim {
namespace {

using detail::KeptBatch;

const NaturalGradientOptions& natural_gradient_options(
    const torch::optim::OptimizerOptions& options) {
  const auto* result = dynamic_cast<const NaturalGradientOptions*>(&options);
  TORCH_CHECK_VALUE(result != nullptr,
                    "a parameter group of NaturalGradient needs NaturalGradientOptions");
  return *result;
}

std::vector<double> dampings(const detail::JointStep& step) {
  std::vector<double> result;
  for (const auto* options : step.options) {
    result.push_back(natural_gradient_options(*options).damping());
  }
  return result;
}

detail::CapturedBatch core_batch(const KeptBatch& batch, const detail::JointStep& step,
                                 const std::vector<at::Tensor>& all_params) {
  detail::CapturedBatch result;
  result.calls = batch.calls_in([&](int64_t i) { return step.position(all_params[i]); });
  result.scale = static_cast<double>(batch.samples());
  return result;
}

}  // namespace

struct NaturalGradient::Notes {
  std::shared_ptr<const KeptBatch> kept_batch;  // of the last refresh; null: none
  // The factorisation of a batch, and what it depends on.
  struct {
    std::shared_ptr<const KeptBatch> batch;
    std::vector<double> dampings;
    std::string solver;
    std::vector<at::Tensor> params;
    at::Tensor L;
  } factorization;
  int64_t samples = 0;
  at::Tensor result;  // of the last step
};

NaturalGradientOptions::NaturalGradientOptions(double lr) : lr_(lr) {}

double NaturalGradientOptions::get_lr() const { return lr(); }
void NaturalGradientOptions::set_lr(const double lr) { this->lr(lr); }

void NaturalGradientOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(archive, *this);
}
void NaturalGradientOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(archive, *this);
}

bool operator==(const NaturalGradientOptions& lhs, const NaturalGradientOptions& rhs) {
  return detail::equal_options(lhs, rhs);
}

NaturalGradient::NaturalGradient(const torch::nn::Module& model, NaturalGradientOptions defaults)
    : CapturingOptimizer(model, std::make_unique<NaturalGradientOptions>(std::move(defaults))),
      capture_(std::make_unique<detail::BatchCapture>()),
      notes_(std::make_unique<Notes>()) {
  initialize_with_model();
  check_known_layers(all_params());
}

NaturalGradient::NaturalGradient(const torch::nn::Module& model,
                                 const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                                 NaturalGradientOptions defaults)
    : CapturingOptimizer(model, std::make_unique<NaturalGradientOptions>(std::move(defaults))),
      capture_(std::make_unique<detail::BatchCapture>()),
      notes_(std::make_unique<Notes>()) {
  initialize(param_groups);
  check_known_layers(all_params());
}

NaturalGradient::~NaturalGradient() = default;
NaturalGradient::NaturalGradient(NaturalGradient&&) noexcept = default;
NaturalGradient& NaturalGradient::operator=(NaturalGradient&&) noexcept = default;

torch::OrderedDict<std::string, at::Tensor> NaturalGradient::compute_per_sample_gradients(
    const torch::nn::Module& model, const ForwardFunction& forward, const LossFunction& loss_fn,
    const at::Tensor& inputs, const at::Tensor& targets) {
  return per_sample_gradients(model, forward, loss_fn, inputs, targets);
}

void NaturalGradient::check_options(const Options& options) const {
  detail::check_options(natural_gradient_options(options));
}

void NaturalGradient::check_together(const std::vector<const Options*>& groups) const {
  detail::check_same_in_all<NaturalGradientOptions>("NaturalGradient", groups);
}

std::unique_ptr<SecondOrderParamState> NaturalGradient::make_empty_state() const {
  return std::make_unique<NaturalGradientParamState>();
}

NaturalGradientParamState* NaturalGradient::state_of(const at::Tensor& param) const {
  return static_cast<NaturalGradientParamState*>(find_state(param));
}

const char* NaturalGradient::root_name() const { return "the natural gradient by"; }

// ---- capture

void NaturalGradient::forget_captures() {
  capture_->watch(all_params());
  capture_->forget();
  capture_->set_enabled(is_refresh());
}

// Whether the next step takes its Fisher matrix from its own batch.
bool NaturalGradient::is_refresh() const {
  if (param_groups_.empty()) {
    return true;
  }
  int64_t taken = 0;
  for (const int64_t count : steps_taken(all_params())) {
    taken = std::max(taken, count);
  }
  const auto& o = natural_gradient_options(param_groups_.front().options());
  return taken % o.update_freq() == 0 || notes_->kept_batch == nullptr;
}

// ---- what cannot be seen

// Refuses layers of which it is known at once that they are not supported.
void NaturalGradient::check_known_layers(const std::vector<at::Tensor>& params) const {
  for (const auto& param : params) {
    const auto* place = param.requires_grad() ? layers().find(param) : nullptr;
    TORCH_CHECK_VALUE(place == nullptr || place->problem.empty(),
                      "NaturalGradient cannot see the samples of ", place->module, ", which ",
                      place->problem, "; freeze its parameter '", place->name,
                      "' or give it to another optimizer, as torchium::optim::Shampoo");
  }
}

// Refuses a batch whose samples are not known, before anything is changed.
void NaturalGradient::check_capture(const detail::JointStep& step, const KeptBatch& batch) const {
  check_known_layers(step.params);
  layers().refuse_mixed_samples();
  TORCH_CHECK_VALUE(
      !capture_->mixes_samples(),
      "batch_norm() with training = true, called in the forward pass, normalised with "
      "the statistics of the batch, so that a sample has no gradient of its own; "
      "call it with training = false and running statistics, or use group_norm()");
  TORCH_CHECK_VALUE(!batch.calls.empty(),
                    "NaturalGradient has captured no backward pass since the last step or "
                    "zero_grad(); make the optimizer before the forward pass, and call backward() "
                    "once a batch");
  const auto params = all_params();
  std::vector<bool> is_used(params.size(), false);
  for (const auto& call : batch.calls) {
    for (const int64_t i : {call.weight, call.bias}) {
      if (i >= 0) {
        is_used[i] = true;
      }
    }
  }
  for (const auto i : c10::irange(params.size())) {
    const bool is_known = is_used[i] && !capture_->is_used_otherwise(i);
    TORCH_CHECK_VALUE(
        is_known || step.position(params[i]) < 0, "the gradient of ", describe(params[i]),
        " does not come from operators alone that NaturalGradient captures (linear, "
        "conv2d, embedding, layer_norm, group_norm) with the parameter itself; freeze "
        "it, use it only so, or add the gradient of a penalty after backward()");
  }
  detail::check_samples(batch, [&](int64_t i) { return name_of(params[i]); });
}

// ---- the step

// State of parameters that were moved or cast goes with them.
void NaturalGradient::convert_states(const detail::JointStep& step) {
  bool converted = false;
  for (const auto& param : step.params) {
    auto* state = state_of(param);
    if (state != nullptr) {
      check_shapes(param, *state);
    }
    if (state != nullptr && !state->is_of(param)) {
      state->convert_to(param);
      converted = true;
    }
  }
  if (converted) {
    notes_->factorization = {};
    notes_->kept_batch =
        detail::read_batch(all_params(), [&](const auto& param) { return state_of(param); });
  }
}

// Returns whether there are momentum buffers.
bool NaturalGradient::create_states(const detail::JointStep& step) {
  const bool has_momentum = std::any_of(
      step.options.begin(), step.options.end(),
      [](const auto* options) { return natural_gradient_options(*options).momentum() > 0.0; });
  for (const auto& param : step.params) {
    if (find_state(param) == nullptr) {
      add_state(param, make_empty_state());
    }
    at::Tensor& buffer = state_of(param)->momentum_buffer();
    if (has_momentum && !buffer.defined()) {
      buffer = detail::parameter_shaped_zeros(param);
    }
  }
  return has_momentum;
}

// The factorisation of an earlier step, if it can be used again; else undefined.
at::Tensor NaturalGradient::known_factorization(
    const detail::JointStep& step, const std::shared_ptr<const KeptBatch>& batch) const {
  const auto& known = notes_->factorization;
  const bool fits =
      known.batch == batch && known.dampings == dampings(step) &&
      known.solver == natural_gradient_options(*step.options.front()).solver() &&
      std::equal(known.params.begin(), known.params.end(), step.params.begin(), step.params.end(),
                 [](const auto& a, const auto& b) { return a.is_same(b); });
  return fits ? known.L : at::Tensor();
}

void NaturalGradient::take_joint_step(const detail::JointStep& joint) {
  capture_->raise_error();
  refuse_processes(capture_->processes());
  convert_states(joint);
  const bool refresh = is_refresh();
  auto batch = notes_->kept_batch;
  if (refresh) {
    std::vector<bool> active;
    for (const auto& param : all_params()) {
      active.push_back(joint.position(param) >= 0);
    }
    batch = std::make_shared<const KeptBatch>(capture_->batch(active));
    check_capture(joint, *batch);
  }
  const bool has_momentum = create_states(joint);
  const auto& shared = natural_gradient_options(*joint.options.front());
  detail::NaturalGradientHyperparameters h;
  h.lrs = joint.lrs;
  h.dampings = dampings(joint);
  for (const auto* options : joint.options) {
    const auto& o = natural_gradient_options(*options);
    h.momentums.push_back(o.momentum());
    h.maximize.push_back(o.maximize());
  }
  h.eps = shared.eps();
  h.max_norm = shared.max_norm();
  h.solver = shared.solver();

  at::Tensor L = known_factorization(joint, batch);
  detail::GroupStep step = begin_call(0, joint.params);
  detail::NaturalGradientState state;
  state.steps = detail::member_list(step.states, &SecondOrderParamState::step);
  if (has_momentum) {
    state.momentum_buffers =
        detail::member_list(step.states, &NaturalGradientParamState::momentum_buffer);
  }
  state.status = step.status;
  const auto before = steps_taken({joint.params.front()});
  notes_->result = detail::natural_gradient_step(h, step.params, step.grads, state,
                                                 core_batch(*batch, joint, all_params()), L,
                                                 refresh, /*found_inf=*/{});
  notes_->factorization = {batch, h.dampings, h.solver, joint.params, L};
  notes_->samples = batch->samples();
  finish_step(0, step);
  // On the CPU a skipped step is known at once.
  if (refresh && steps_taken({joint.params.front()}) > before) {
    keep(std::move(batch));
  }
}

// Keeps the batch in the state if later steps need it; they must not see it change.
void NaturalGradient::keep(std::shared_ptr<const KeptBatch> batch) {
  const auto params = all_params();
  detail::clear_batch(params, [&](const auto& param) { return state_of(param); });
  const auto& o = natural_gradient_options(param_groups_.front().options());
  auto factorization = std::exchange(notes_->factorization, {});
  notes_->kept_batch = nullptr;
  if (o.update_freq() == 1) {
    return;
  }
  detail::write_batch(*batch, params, [&](const auto& param) { return state_of(param); });
  notes_->kept_batch =
      detail::read_batch(params, [&](const auto& param) { return state_of(param); });
  factorization.batch = notes_->kept_batch;
  notes_->factorization = std::move(factorization);
}

NaturalGradientReport NaturalGradient::report() const {
  refuse_moved_from();
  NaturalGradientReport report;
  if (notes_->result.defined()) {
    const at::Tensor result = notes_->result.cpu();
    const double* values = result.const_data_ptr<double>();
    report.solver = values[2] != 0.0 ? "cg" : "gram";
    report.samples = notes_->samples;
    report.iterations = static_cast<int64_t>(values[0]);
    report.relative_residual = values[1];
  }
  return report;
}

// ---- checkpoints

void NaturalGradient::fit_loaded(const Options& options, const std::vector<at::Tensor>& params,
                                 const std::vector<SecondOrderParamState*>& loaded,
                                 const std::vector<SecondOrderParamState*>& fitted) const {
  const auto count = static_cast<int64_t>(all_params().size());
  for (const auto i : c10::irange(params.size())) {
    detail::fit_batch(static_cast<const NaturalGradientParamState&>(*loaded[i]),
                      static_cast<NaturalGradientParamState&>(*fitted[i]), params[i], count,
                      describe(params[i]));
  }
}

std::function<void()> NaturalGradient::read_more(torch::serialize::InputArchive& archive) {
  return [this] {
    *notes_ = Notes();
    notes_->kept_batch =
        detail::read_batch(all_params(), [&](const auto& param) { return state_of(param); });
    forget_captures();
  };
}

}  // namespace torchium::optim
