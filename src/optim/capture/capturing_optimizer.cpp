#include "torchium/optim/capturing_optimizer.h"

#include "distributed/communicator.h"
#include "gradients/capture/model_layers.h"
#include "gradients/capture/operator_capture.h"
#include "optim/capture/joint_plan.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace torchium::optim {
namespace {

// Weight and bias of a capture, as positions in the plan.
void use_positions(const std::vector<int64_t>& positions, gradients::detail::LayerCall& call) {
  for (int64_t* param : {&call.weight, &call.bias}) {
    *param = *param < 0 ? -1 : positions[*param];
  }
}

}  // namespace

CapturingOptimizer::CapturingOptimizer(const torch::nn::Module& model,
                                       std::unique_ptr<Options> defaults)
    : SecondOrderOptimizer(std::move(defaults)),
      layers_(std::make_unique<gradients::detail::ModelLayers>(model)) {}

CapturingOptimizer::~CapturingOptimizer() = default;
CapturingOptimizer::CapturingOptimizer(CapturingOptimizer&&) noexcept = default;
CapturingOptimizer& CapturingOptimizer::operator=(CapturingOptimizer&&) noexcept = default;

void CapturingOptimizer::initialize(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  SecondOrderOptimizer::initialize(param_groups);
  forget_derived();
  follow_schedules();
  forget_captures();
}

void CapturingOptimizer::initialize_with_model() {
  std::vector<at::Tensor> params;
  for (const auto& [param, place] : layers_->parameters()) {
    params.push_back(param);
  }
  initialize({torch::optim::OptimizerParamGroup(std::move(params))});
}

void CapturingOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  SecondOrderOptimizer::add_param_group(param_group);
  try {
    follow_schedules();
  } catch (...) {
    param_groups_.pop_back();
    throw;
  }
  forget_captures();
}

at::Tensor CapturingOptimizer::step(LossClosure closure) {
  refuse_moved_from();
  try {  // a wrong option leaves what was captured
    follow_schedules();
    check_groups();
  } catch (...) {
    withdraw();
    throw;
  }
  at::Tensor loss;
  try {
    loss = SecondOrderOptimizer::step(std::move(closure));
  } catch (...) {
    forget_captures();
    throw;
  }
  forget_captures();
  return loss;
}

void CapturingOptimizer::zero_grad(bool set_to_none) {
  refuse_moved_from();
  SecondOrderOptimizer::zero_grad(set_to_none);
  forget_captures();
}

// ---- the plan

void CapturingOptimizer::forget_derived() {
  if (capture_ != nullptr) {
    capture_->warn_of_gradients_without_calls();
  }
  plan_ = make_plan();
  plan_->share_with(ranks_of(defaults()));
  capture_ = nullptr;  // brings its calls to the plan
}

void CapturingOptimizer::read_reports(bool wait) {
  if (wait) {
    plan_->request_report();
  }
  while (const auto failure = plan_->next_failure(wait)) {
    raise_failure(/*group=*/0, *failure);
  }
}

bool CapturingOptimizer::is_bound() const {
  const detail::JointPlan& plan = joint_plan();
  size_t i = 0;
  for (const auto group : c10::irange(param_groups_.size())) {
    for (const auto& param : param_groups_[group].params()) {
      if (i >= plan.size() || !plan.param(i).is_same(param) ||
          plan.group(i) != static_cast<int64_t>(group) || !plan.is_bound_to(i, find_state(param))) {
        return false;
      }
      ++i;
    }
  }
  return i == plan.size();
}

CapturingOptimizer::NamedStates CapturingOptimizer::tensors_of_states() const {
  NamedStates states;
  for (const at::Tensor& param : all_params()) {
    const auto* state = find_state(param);
    states.push_back(state == nullptr ? detail::NamedTensors() : state->tensors());
  }
  return states;
}

std::vector<int64_t> CapturingOptimizer::groups_of_params() const {
  std::vector<int64_t> groups;
  for (const auto group : c10::irange(param_groups_.size())) {
    groups.insert(groups.end(), param_groups_[group].params().size(), static_cast<int64_t>(group));
  }
  return groups;
}

void CapturingOptimizer::bind() {
  std::vector<std::string> names;
  for (const auto group : c10::irange(param_groups_.size())) {
    for (const auto i : c10::irange(param_groups_[group].params().size())) {
      names.push_back(describe(group, i));
    }
  }
  joint_plan().bind(all_params(), tensors_of_states(), groups_of_params(), std::move(names));
}

MemoryReport CapturingOptimizer::memory_report() const {
  refuse_moved_from();
  const auto params = all_params();
  std::vector<std::string> names;
  for (const at::Tensor& param : params) {
    names.push_back(name_of(param));
  }
  return joint_plan().memory_report(params, tensors_of_states(), groups_of_params(), names,
                                    param_groups_.size());
}

void CapturingOptimizer::change_states(const std::vector<detail::StateChange>& changes) {
  const auto params = all_params();
  for (const auto& [i, key, value] : changes) {
    auto& state = state_[params[i].unsafeGetTensorImpl()];
    if (state == nullptr) {
      state = make_empty_state();
    }
    static_cast<SecondOrderParamState&>(*state).assign(key, value.value_or(at::Tensor()));
  }
}

void CapturingOptimizer::adopt_options() {
  std::vector<const Options*> options;
  for (const auto& group : param_groups_) {
    options.push_back(&group.options());
  }
  joint_plan().set_options(options);
}

CapturingOptimizer::StateList CapturingOptimizer::fit_states(size_t group, const Options& options,
                                                             const StateList& loaded) const {
  const auto count = static_cast<int64_t>(all_params().size());
  StateList fitted(loaded.size());
  for (const auto i : c10::irange(loaded.size())) {
    if (loaded[i] != nullptr) {
      const at::Tensor& param = param_groups_[group].params()[i];
      fitted[i] = make_empty_state();
      for (const auto& [key, tensor] :
           joint_plan().load(param, loaded[i]->tensors(), options, count, describe(group, i))) {
        fitted[i]->assign(key, tensor);
      }
    }
  }
  return fitted;
}

std::vector<int64_t> CapturingOptimizer::next_steps() {
  if (!is_bound()) {
    bind();
  }
  return joint_plan().next_steps(param_groups_.size());
}

void CapturingOptimizer::adopt_groups() {
  if (!is_bound()) {
    bind();
  }
  adopt_options();
}

void CapturingOptimizer::forget_captures() {
  bool is_known = true;
  try {
    follow_schedules();
  } catch (const std::exception&) {  // the next step throws it
    is_known = false;
  }
  adopt_groups();
  detail::JointPlan& plan = joint_plan();
  plan.forget();
  std::vector<at::Tensor> watched;
  watched_.clear();
  for (const auto i : c10::irange(plan.size())) {
    if (is_watched(plan.param(i))) {
      watched.push_back(plan.param(i));
      watched_.push_back(static_cast<int64_t>(i));
    }
  }
  if (capture_ == nullptr || !capture_->watches(watched)) {
    capture_ = nullptr;
    // Backward passes may run on other threads, and end after the optimizer does.
    const auto receive = [plan = plan_, positions = watched_](
                             gradients::detail::LayerCall call,
                             const std::vector<int64_t>& gone_passes) {
      use_positions(positions, call);
      plan->receive(std::move(call), gone_passes);
    };
    capture_ = std::make_unique<gradients::detail::OperatorCapture>(
        watched, receive, takes_batch_norm(), plan.joins_passes());
    std::vector<int64_t> inner;
    for (const auto i : c10::irange(watched.size())) {
      const auto* place = layers_->find(watched[i]);
      if (place != nullptr && place->samples == gradients::detail::SampleDimension::kSecond) {
        inner.push_back(static_cast<int64_t>(i));
      }
    }
    capture_->set_inner_samples(inner);
  }
  capture_->forget();
  capture_->set_enabled(is_known && captures_next());
}

std::vector<gradients::detail::DifferentiableCall> CapturingOptimizer::calls_of(
    const at::Tensor& outputs) const {
  auto calls = capture_->calls_of(outputs);
  for (auto& call : calls) {
    use_positions(watched_, call.layer);
  }
  return calls;
}

void CapturingOptimizer::update_curvature(const at::Tensor& outputs, const std::string& loss,
                                          const CurvatureOptions& options) {
  refuse_moved_from();
  check_groups();
  adopt_groups();
  const std::string& fisher = plan_->fisher();
  detail::check_takes_curvature(fisher);
  if (captures_next()) {
    const detail::LossCurvature curvature(outputs, loss, fisher, options);
    plan_->record_curvature(outputs, curvature, calls_of(outputs));
  }
}

bool CapturingOptimizer::is_used_otherwise(const at::Tensor& param) const {
  return capture_->is_used_otherwise(param);
}

bool CapturingOptimizer::mixes_samples(const std::vector<int64_t>& passes) const {
  return std::any_of(passes.begin(), passes.end(),
                     [&](int64_t pass) { return capture_->mixes_samples(pass); });
}

void CapturingOptimizer::withdraw() { plan_->withdraw(); }

void CapturingOptimizer::take_step() {
  std::vector<at::Tensor> active = all_params();
  std::erase_if(active, [](const at::Tensor& param) { return !param.grad().defined(); });
  if (active.empty() && !plan_->is_shared()) {
    return;
  }
  try {
    prepare_step(active);
  } catch (...) {
    withdraw();
    throw;
  }
  detail::JointInputs inputs;
  for (const auto g : c10::irange(param_groups_.size())) {
    inputs.lrs.push_back(plan_->learning_rate(g, param_groups_[g].options().get_lr()));
  }
  change_states(plan_->take(inputs));
}

void CapturingOptimizer::sync_lr() {
  refuse_moved_from();
  std::vector<double> lrs;
  for (const auto& group : param_groups_) {
    lrs.push_back(group.options().get_lr());
    detail::check_learning_rate(lrs.back());
  }
  plan_->sync_learning_rates(lrs);
}

void CapturingOptimizer::prepare_step(const std::vector<at::Tensor>& active) {
  capture_->raise_error();
  const int64_t processes = plan_->is_shared() ? 1 : capture_->processes();
  TORCH_CHECK(
      processes <= 1, plan_->optimizer_name(), " has no process_group, but ", processes,
      " processes have exchanged tensors: what they capture would not be combined, and their "
      "parameters would drift apart. Set process_group in its options");
  adopt_groups();
  detail::JointPlan& plan = joint_plan();
  std::vector<int64_t> excluded;
  for (const int64_t i : watched_) {
    if (is_used_otherwise(plan.param(i))) {
      excluded.push_back(i);
    }
  }
  plan.exclude(excluded);
  check_layers(active);
  if (!plan.prepare()) {
    bind();
    const auto changes = plan.missing_state();
    announce();
    change_states(changes);
    bind();
    TORCH_CHECK(plan.prepare(), "parameters, gradients or state changed during step()");
  }
  announce();
}

std::vector<at::Tensor> CapturingOptimizer::all_params() const {
  std::vector<at::Tensor> params;
  for (const auto& group : param_groups_) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

std::string CapturingOptimizer::name_of(const at::Tensor& param) const {
  const auto* place = layers_->find(param);
  return place != nullptr ? place->name : place_of(param);
}

std::string CapturingOptimizer::describe(size_t group, size_t position) const {
  const auto* place = layers_->find(param_groups_[group].params()[position]);
  const std::string name = SecondOrderOptimizer::describe(group, position);
  return place != nullptr ? "'" + place->name + "', " + name : name;
}

}  // namespace torchium::optim
