#include "optim/core/step_prologue.h"

#ifdef TORCHIUM_WITH_CUDA
#include "optim/core/cuda/device_check.h"
#endif

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace torchium::optim::detail {
namespace {

class EagerPrologue : public StepPrologue {
 public:
  EagerPrologue(const std::vector<at::Tensor>& params, const StateList& states, at::Tensor status,
                std::vector<double> weight_decays)
      : params_(params),
        states_(states),
        steps_(list_of(states, &ParameterState::step)),
        status_(std::move(status)),
        weight_decays_(std::move(weight_decays)) {}

  void begin(at::TensorList grads) override {
    grads_ = grads.vec();
    examined_ = examined_gradients(params_, grads_, steps_, weight_decays_);
  }

  void examine(const at::Tensor& tensor, size_t param, double largest) override {
    examined_.push_back({tensor, param, largest, {}});
  }

  bool run(const StepRule& rule, const at::Tensor& found_inf) override {
    rule_ = rule;
    guard_ = FoundInfGuard::check(examined_, status_, found_inf);
    if (!guard_.skipped_on_host()) {
      guard_.advance(steps_);
    }
    return !guard_.skipped_on_host();
  }

  FoundInfGuard guard() const override { return guard_; }

  StepScalar correction(Average average, size_t i) const override {
    const ParameterState& state = states_[i];
    switch (average) {
      case Average::kGradient:
        return bias_correction(rule_.beta1, state.step, state.exp_avg_start);
      case Average::kSecondMoment:
        return bias_correction(rule_.moment_beta, state.step, state.grafting_second_moment_start);
      default:
        return bias_correction(rule_.beta2, state.step, {});
    }
  }

  void end() override {
    grads_.clear();
    examined_.clear();
    guard_ = FoundInfGuard::open();
  }

 private:
  const std::vector<at::Tensor>& params_;
  const StateList& states_;
  std::vector<at::Tensor> steps_;
  at::Tensor status_;
  std::vector<double> weight_decays_;  // one per parameter
  std::vector<at::Tensor> grads_;
  std::vector<Examined> examined_;
  StepRule rule_;
  FoundInfGuard guard_ = FoundInfGuard::open();
};

}  // namespace

StepScalar bias_correction(double beta, const at::Tensor& step, const at::Tensor& start) {
  if (beta == 1.0) {
    return {};
  }
  if (step.is_cpu()) {
    const double t = count_on_cpu(step) - (start.defined() ? count_on_cpu(start) : 0.0);
    return {1.0 - std::pow(beta, std::max(t, 1.0)), {}};
  }
  const at::Tensor t = start.defined() ? step - start : step;
  return {1.0, 1.0 - at::pow(beta, t.to(at::kDouble).clamp_min(1.0))};
}

std::unique_ptr<StepPrologue> StepPrologue::make(const std::vector<at::Tensor>& params,
                                                 const StateList& states, at::Tensor status,
                                                 double weight_decay) {
  return make(params, states, std::move(status), std::vector<double>(params.size(), weight_decay));
}

std::unique_ptr<StepPrologue> StepPrologue::make(const std::vector<at::Tensor>& params,
                                                 const StateList& states, at::Tensor status,
                                                 const std::vector<double>& weight_decays) {
#ifdef TORCHIUM_WITH_CUDA
  if (status.is_cuda()) {
    auto check = std::make_unique<DeviceCheck>(params[0].options(), std::move(status));
    for (size_t i = 0; i < params.size(); ++i) {
      check->add_parameter(params[i], weight_decays[i], states[i].step,
                           {states[i].exp_avg_start, states[i].grafting_second_moment_start});
    }
    return check;
  }
#endif
  return std::make_unique<EagerPrologue>(params, states, std::move(status), weight_decays);
}

std::vector<at::Tensor> PrologueStep::inputs() {
  std::vector<at::Tensor> inputs;
  for (const size_t i : read_by_operators_) {
    inputs.push_back(grads_[i]);
  }
  return inputs;
}

void PrologueStep::set_inputs(at::TensorList inputs) {
  for (size_t k = 0; k < read_by_operators_.size(); ++k) {
    grads_[read_by_operators_[k]] = inputs[k];
  }
}

}  // namespace torchium::optim::detail
