#include "optim/natural_gradient/natural_gradient_plan.h"

#include "optim/capture/adaptive_damping.h"
#include "optim/core/argument_checks.h"
#include "optim/core/found_inf_guard.h"
#include "optim/natural_gradient/natural_gradient_planned_step.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

using gradients::detail::LayerCall;

bool same_tensors(const KeptBatch& a, const KeptBatch& b) {
  return std::equal(a.calls.begin(), a.calls.end(), b.calls.begin(), b.calls.end(),
                    [](const LayerCall& x, const LayerCall& y) {
                      return x.input.is_same(y.input) &&
                             x.output_gradient.is_same(y.output_gradient) && x.weight == y.weight &&
                             x.bias == y.bias;
                    });
}

}  // namespace

void NaturalGradientPlan::make_room(SecondOrderParamState& fresh,
                                    const SecondOrderParamState& saved, const at::Tensor& param,
                                    const torch::optim::OptimizerOptions& /*options*/,
                                    int64_t params, const std::string& name) const {
  add_saved_room(static_cast<NaturalGradientParamState&>(fresh),
                 static_cast<const NaturalGradientParamState&>(saved), param, params, name);
}

bool NaturalGradientPlan::has_momentum() const {
  return std::any_of(options().begin(), options().end(),
                     [](const auto& each) { return each.momentum() > 0.0; });
}

BatchStates NaturalGradientPlan::batch_states() const {
  BatchStates states;
  for (const auto i : c10::irange(size())) {  // these are only read
    states.push_back(&const_cast<NaturalGradientParamState&>(state_of(i)));
  }
  return states;
}

void NaturalGradientPlan::after_bind() {
  auto kept = has_kept_params() ? read_batch(batch_states()) : nullptr;
  const auto is_bound = [&](const LayerCall& call) {
    return std::max(call.weight, call.bias) < static_cast<int64_t>(size());
  };
  if (kept != nullptr && !(std::ranges::all_of(kept->calls, is_bound) && is_own(*kept))) {
    kept = nullptr;
  }
  if (kept == nullptr || !kept_is(*kept)) {
    set_kept(std::move(kept));
  }
  if (kept_ == nullptr) {
    refresh_.reset();
  }
  batch_ = nullptr;
}

// A decision against a refresh stays: the calls of this step were not captured.
void NaturalGradientPlan::after_set_options() {
  if (refresh_ == true) {
    refresh_.reset();
  }
  forget_graphs(graph_mode(options().empty() ? "never" : options().front().graphs()));
}

void NaturalGradientPlan::set_kept(std::shared_ptr<const KeptBatch> batch) {
  kept_ = std::move(batch);
  kept_shapes_.clear();
  kept_memory_.clear();
  if (kept_ == nullptr) {
    return;
  }
  kept_params_.clear();
  for (const auto i : c10::irange(size())) {
    kept_params_.push_back(param(i).unsafeGetTensorImpl());
  }
  for (const LayerCall& call : kept_->calls) {
    kept_memory_.emplace_back(call.input);
    kept_memory_.emplace_back(call.output_gradient);
  }
}

bool NaturalGradientPlan::kept_is(const KeptBatch& batch) const {
  return kept_ != nullptr && same_tensors(batch, *kept_) &&
         std::ranges::all_of(kept_memory_, [](const auto& seen) { return seen.is_unchanged(); });
}

// Its calls name parameters by position: others may only have been added at the end.
bool NaturalGradientPlan::has_kept_params() const {
  if (kept_params_.size() > size()) {
    return false;
  }
  for (const auto i : c10::irange(kept_params_.size())) {
    if (param(i).unsafeGetTensorImpl() != kept_params_[i]) {
      return false;
    }
  }
  return true;
}

// ---- layer calls

bool NaturalGradientPlan::is_refresh() {
  if (!refresh_ && !host_decides()) {
    refresh_ = true;  // update_freq is 1
  } else if (!refresh_) {
    if (is_shared() && !options().empty() && options().front().update_freq() > 1) {
      settle_reports();  // all ranks decide by the same counts
    } else {
      take_reports(/*wait=*/false);
    }
    int64_t taken = 0;
    for (const int64_t count : steps_taken()) {
      taken = std::max(taken, count);
    }
    refresh_ =
        options().empty() || taken % options().front().update_freq() == 0 || kept_ == nullptr;
  }
  return *refresh_;
}

// ---- the step

bool NaturalGradientPlan::is_start() {
  return passes_.empty() && columns_.empty() && given_ == nullptr && is_refresh() &&
         only_creates_state();
}

// Before anything is changed.
void NaturalGradientPlan::check(const std::vector<size_t>& active) {
  if (given_ != nullptr) {
    check_given();
    batch_ = given_;
    return;
  }
  if (is_refresh()) {
    batch_ = nullptr;
    if (!is_start()) {
      require_curvature();
      auto batch = recorded_batch(active);
      check_recorded(*batch, active);
      batch_ = std::move(batch);
    }
    return;
  }
  for (const size_t i : active) {
    const auto shape = kept_shapes_.find(param(i).unsafeGetTensorImpl());
    TORCH_CHECK_VALUE(shape == kept_shapes_.end() || param(i).sizes() == shape->second, name(i),
                      " has got another shape since its batch (for shape ", shape->second,
                      ") was kept; delete its state to start afresh");
  }
  batch_ = kept_;
}

void NaturalGradientPlan::complete(size_t i, SecondOrderParamState& completed) {
  auto& state = static_cast<NaturalGradientParamState&>(completed);
  if (has_momentum() && !state.momentum_buffer().defined()) {
    state.momentum_buffer(parameter_shaped_zeros(param(i)));
  }
}

std::unique_ptr<PlannedStep> NaturalGradientPlan::plan(const std::vector<at::Tensor>& params,
                                                       const StateList& states, at::Tensor status) {
  auto step = std::make_unique<NaturalGradientPlannedStep>();
  const NaturalGradientOptions& shared = options().front();
  step->options.max_norm = shared.max_norm();
  step->options.max_workspace_bytes = shared.max_workspace_bytes();
  step->options.adaptive_damping = shared.adaptive_damping();
  for (const size_t i : active()) {
    step->options.dampings.push_back(options(i).damping());
    step->options.momentums.push_back(options(i).momentum());
    step->options.maximize.push_back(options(i).maximize());
  }
  step->options.nystrom_rank = shared.nystrom_rank();
  step->is_reused = shared.update_freq() > 1;
  // Not for "auto": destroy_process_group() waits forever while such a graph exists.
  step->captures_collectives = graph_mode(shared.graphs()) == GraphMode::kAlways;
  step->params = params;
  step->state.steps = list_of(states, &ParameterState::step);
  for (const ParameterState& state : states) {
    if (has_momentum()) {
      step->state.momentum_buffers.push_back(state.momentum_buffer);
    }
  }
  step->state.status = std::move(status);
  check_parameters(params, step->state.steps, step->state.status);
  return step;
}

bool NaturalGradientPlan::Factorization::is_of(const Factorization& other) const {
  return batch == other.batch && dampings == other.dampings && solver == other.solver &&
         max_workspace_bytes == other.max_workspace_bytes && nystrom_rank == other.nystrom_rank &&
         std::equal(params.begin(), params.end(), other.params.begin(), other.params.end(),
                    [](const auto& a, const auto& b) {
                      return a.first.is_same(b.first) && a.second == b.second;
                    });
}

// The batch with parameters as positions in the active ones.
CapturedBatch NaturalGradientPlan::captured(const KeptBatch& batch) const {
  std::vector<int64_t> place(size(), -1);
  for (const auto k : c10::irange(active().size())) {
    place[active()[k]] = static_cast<int64_t>(k);
  }
  CapturedBatch result{.calls = batch.calls,
                       .scale = static_cast<double>(batch.rows()),
                       .loss_scale = batch.loss_scale};
  for (LayerCall& call : result.calls) {
    call.weight = call.weight < 0 ? -1 : place[call.weight];
    call.bias = call.bias < 0 ? -1 : place[call.bias];
  }
  if (!batch.given_rows.empty()) {
    for (const size_t i : active()) {
      result.given_rows.push_back(batch.given_rows[i]);
    }
    result.residuals = batch.residuals;
  }
  return result;
}

NaturalGradientPlan::Factorization NaturalGradientPlan::factorization_for(
    const NaturalGradientPlannedStep& step) const {
  Factorization result{batch_,
                       step.options.dampings,
                       options().front().solver(),
                       step.options.max_workspace_bytes,
                       step.options.nystrom_rank,
                       {},
                       {}};
  for (const at::Tensor& param : step.params) {
    result.params.emplace_back(param, param.scalar_type());
  }
  return result;
}

// What reports, the budget of iterations and update_damping() need of a step.
void NaturalGradientPlan::take_numbers(NaturalGradientPlannedStep& step) {
  solver_ = step.solver.name;
  numbers_ = std::move(step.numbers);
  if (solver_ == "cg" && !device().is_cpu() && !torchium::detail::is_capturing(device())) {
    budget_.submit(numbers_, step.solver.rule.tolerance);
  }
  ++steps_since_damping_;
  lrs_.clear();
  if (step.options.adaptive_damping) {  // a tensor may change before update_damping()
    for (const at::Tensor& lr : step.options.lrs) {
      lrs_.push_back(lr.clone());
    }
  }
}

StateChanges NaturalGradientPlan::take_agreed(const JointInputs& inputs) {
  auto* step = static_cast<NaturalGradientPlannedStep*>(planned());
  if (step == nullptr) {
    return {};
  }
  step->options.lrs = learning_rates(inputs);
  const bool refreshed = is_refresh();
  step->batch = {};
  Factorization wanted = factorization_for(*step);
  if (batch_ != nullptr && refreshed && inputs.loss_scale.defined() && !batch_->is_curvature()) {
    auto scaled = std::make_shared<KeptBatch>(*batch_);
    scaled->loss_scale = inputs.loss_scale;
    wanted.batch = batch_ = std::move(scaled);
  }
  RankBatch own = own_batch(refreshed);
  own.has_factorization = wanted.is_of(factorization_) && factorization_.L.defined();
  const JointBatch joint = joint_batch(own);
  if (batch_ != nullptr) {
    wanted.batch = batch_;
    rows_ = joint.rows;
    samples_ = joint.samples;
    step->batch = captured(*batch_);
    step->batch.is_of_gradient = joint.is_of_gradient;
    step->batch.shared = joint.shared;
    step->is_kept = !refreshed;
    step->known_L = joint.has_factorization ? factorization_.L : at::Tensor();
    choose_solver(*step);
    if (step->solver.name == "gram" && !step->known_L.defined()) {
      step->batch.lists = agree_on_lists(step->batch, joint);
    }
  }
  factorization_ = {};
  const at::Tensor& count = step->state.steps.front();
  const double before = count.is_cpu() ? count_on_cpu(count) : -1.0;
  StepPlan::step({}, inputs.found_inf);
  if (batch_ == nullptr) {
    refresh_.reset();
    return {};
  }
  take_numbers(*step);
  wanted.L = std::move(step->L);
  factorization_ = std::move(wanted);
  step->batch = {};
  step->known_L.reset();
  // On the CPU a skipped step is known at once.
  const bool is_skipped = count.is_cpu() && count_on_cpu(count) == before;
  const bool keeps = refreshed && !is_skipped;
  refresh_.reset();
  return keeps ? keep() : StateChanges();
}

void NaturalGradientPlan::choose_solver(NaturalGradientPlannedStep& step) {
  const NaturalGradientOptions& shared = options().front();
  step.solver = chosen_solver(shared.solver(), shared.eps(), shared.max_workspace_bytes(),
                              step.params, rows_);
  step.is_probing = false;
  if (step.solver.name == "cg" && !device().is_cpu()) {
    auto& most = step.solver.rule.max_iterations;
    most = budget_.next(most, /*takes_arrived=*/!torchium::detail::is_capturing(device()));
    if (is_shared()) {  // which numbers have arrived is not the same on all ranks
      most = ranks().all_reduce_max({most}).front();
    }
    step.is_probing = !budget_.is_known();
  }
}

// Copies the batch into the state if later steps need it.
StateChanges NaturalGradientPlan::keep() {
  auto factorization = std::exchange(factorization_, {});
  const bool is_needed = options().front().update_freq() > 1;
  const BatchStates old = batch_states();
  const bool has_old = std::any_of(old.begin(), old.end(),
                                   [](const auto* state) { return state->uses().defined(); });
  if (!is_needed && !has_old) {
    set_kept(nullptr);
    return {};
  }
  std::vector<NaturalGradientParamState> states;
  BatchStates written;
  states.reserve(old.size());
  for (const auto* state : old) {
    states.push_back(*state);
    written.push_back(&states.back());
    if (!is_needed) {
      clear_batch(states.back());
    }
  }
  if (is_needed) {
    write_batch(*batch_, written);
  }
  set_kept(read_batch(written));
  StateChanges changes;
  for (const auto i : c10::irange(size())) {
    kept_shapes_[param(i).unsafeGetTensorImpl()] = param(i).sizes().vec();
    append_changes(static_cast<int64_t>(i), *old[i], states[i], changes);
  }
  if (is_needed) {
    factorization.batch = kept_;
    factorization_ = std::move(factorization);
  }
  return changes;
}

NaturalGradientReport NaturalGradientPlan::report() const {
  NaturalGradientReport report;
  if (numbers_.defined()) {
    const at::Tensor numbers = numbers_.cpu();
    const double* values = numbers.const_data_ptr<double>();
    report.solver = solver_;
    report.samples = samples_;
    report.rows = rows_;
    report.iterations = static_cast<int64_t>(values[0]);
    report.relative_residual = values[1];
    report.graph_bytes = graph_bytes();
  }
  return report;
}

// With delta = -lr nu d and (F + Lambda) d = v, the model v . delta + delta . (F + Lambda) delta /
// 2 is -(lr nu - lr^2 nu^2 / 2) v . d.
std::optional<double> NaturalGradientPlan::predicted_reduction() const {
  if (steps_since_damping_ == 0 || lrs_.empty()) {
    return std::nullopt;
  }
  const double step = common_learning_rate(lrs_) * numbers_[3].item<double>();
  return (step - step * step / 2.0) * numbers_[2].item<double>();
}

std::pair<double, double> NaturalGradientPlan::damping_update(double loss_before,
                                                              double loss_after) {
  agree_to("update_damping()", [&] {
    TORCH_CHECK_VALUE(!options().empty() && options().front().adaptive_damping(),
                      "update_damping() needs adaptive_damping=True");
  });
  const DampingLosses losses =
      joint_losses({loss_before, loss_after, options().front().maximize()});
  const auto update = detail::damping_update(predicted_reduction(), steps_since_damping_, losses);
  steps_since_damping_ = 0;
  return update;
}

}  // namespace torchium::optim::detail
