#include "torchium/optim/natural_gradient.h"

#include "gradients/capture/model_layers.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "optim/natural_gradient/natural_gradient_plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::optim {
NaturalGradientOptions::NaturalGradientOptions(double lr) : lr_(lr) {}

template struct OptionsOf<NaturalGradientOptions>;

NaturalGradient::NaturalGradient(const torch::nn::Module& model, NaturalGradientOptions defaults)
    : CapturingOptimizer(model, std::make_unique<NaturalGradientOptions>(std::move(defaults))) {
  initialize_with_model();
  check_known_layers(all_params());
}

NaturalGradient::NaturalGradient(const torch::nn::Module& model,
                                 const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                                 NaturalGradientOptions defaults)
    : CapturingOptimizer(model, std::make_unique<NaturalGradientOptions>(std::move(defaults))) {
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

void NaturalGradient::check_together(const std::vector<const Options*>& groups) const {
  SecondOrderOptimizer::check_together(groups);
  detail::check_same_in_all<NaturalGradientOptions>("NaturalGradient", groups);
}

std::unique_ptr<SecondOrderParamState> NaturalGradient::make_empty_state() const {
  return std::make_unique<NaturalGradientParamState>();
}

c10::intrusive_ptr<detail::JointPlan> NaturalGradient::make_plan() const {
  return c10::make_intrusive<detail::NaturalGradientPlan>();
}

detail::NaturalGradientPlan& NaturalGradient::plan() const {
  return static_cast<detail::NaturalGradientPlan&>(joint_plan());
}

bool NaturalGradient::captures_next() { return plan().is_refresh(); }

// ---- unsupported layers

// Refuses layers that are known not to be supported.
void NaturalGradient::check_known_layers(const std::vector<at::Tensor>& params) const {
  for (const auto& param : params) {
    const auto* place = param.requires_grad() ? layers().find(param) : nullptr;
    TORCH_CHECK_VALUE(place == nullptr || place->problem.empty(),
                      "NaturalGradient cannot see the samples of ", place->module, ", which ",
                      place->problem, "; freeze its parameter '", place->name,
                      "' or give it to another optimizer, such as torchium::optim::Shampoo");
  }
}

void NaturalGradient::check_layers(const std::vector<at::Tensor>& active) {
  if (!plan().is_refresh() || plan().has_jacobian() || plan().is_start()) {
    return;
  }
  check_known_layers(active);
  layers().refuse_mixed_samples();
  TORCH_CHECK_VALUE(
      !mixes_samples(plan().passes()),
      "batch_norm() with training = true, called in the forward pass, normalised with "
      "the statistics of the batch, so that a sample has no gradient of its own; "
      "call it with training = false and running statistics, or use group_norm()");
}

void NaturalGradient::update_jacobian(const std::vector<at::Tensor>& rows,
                                      const at::Tensor& residuals) {
  refuse_moved_from();
  try {
    check_groups();
    adopt_groups();
  } catch (...) {
    plan().withdraw();
    throw;
  }
  plan().set_jacobian(rows, residuals);
}

double NaturalGradient::update_damping(double loss_before, double loss_after) {
  refuse_moved_from();
  const auto [ratio, factor] = plan().damping_update(loss_before, loss_after);
  for (auto& group : param_groups_) {
    auto& options = static_cast<NaturalGradientOptions&>(group.options());
    options.damping(options.damping() * factor);
  }
  return ratio;
}

NaturalGradientReport NaturalGradient::report() const {
  refuse_moved_from();
  return plan().report();
}

// ---- checkpoints

std::function<void()> NaturalGradient::read_more(torch::serialize::InputArchive& archive) {
  return [this] { forget_captures(); };
}

}  // namespace torchium::optim
