#include "torchium/optim/natural_gradient.h"

#include "gradients/capture/model_layers.h"
#include "optim/core/state_checks.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "optim/natural_gradient/natural_gradient_plan.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::optim {
namespace {

const NaturalGradientOptions& natural_gradient_options(
    const torch::optim::OptimizerOptions& options) {
  const auto* result = dynamic_cast<const NaturalGradientOptions*>(&options);
  TORCH_CHECK_VALUE(result != nullptr,
                    "a parameter group of NaturalGradient needs NaturalGradientOptions");
  return *result;
}

}  // namespace

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

void NaturalGradient::check_options(const Options& options) const {
  detail::check_options(natural_gradient_options(options));
}

void NaturalGradient::check_together(const std::vector<const Options*>& groups) const {
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

void NaturalGradient::adopt_options() {
  std::vector<NaturalGradientOptions> options;
  for (const auto& group : param_groups_) {
    options.push_back(natural_gradient_options(group.options()));
  }
  plan().set_options(std::move(options));
}

bool NaturalGradient::captures_next() { return plan().is_refresh(); }

const char* NaturalGradient::root_name() const { return "the natural gradient by"; }

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

void NaturalGradient::check_layers(const std::vector<at::Tensor>& active) {
  if (!plan().is_refresh() || plan().is_start()) {
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

NaturalGradientReport NaturalGradient::report() const {
  refuse_moved_from();
  return plan().report();
}

// ---- checkpoints

void NaturalGradient::fit_loaded(const Options& options, const std::vector<at::Tensor>& params,
                                 const std::vector<SecondOrderParamState*>& loaded,
                                 const std::vector<SecondOrderParamState*>& fitted) const {
  const auto count = static_cast<int64_t>(all_params().size());
  for (const auto i : c10::irange(params.size())) {
    auto& target = static_cast<NaturalGradientParamState&>(*fitted[i]);
    detail::add_saved_room(target, static_cast<const NaturalGradientParamState&>(*loaded[i]),
                           params[i], count, describe(params[i]));
    const auto sources = loaded[i]->tensors();
    for (const auto& [key, room] : target.tensors()) {
      const at::Tensor* saved = detail::find_tensor(sources, key);
      TORCH_CHECK_VALUE(saved != nullptr, "the archive has no ", key, " of ", describe(params[i]));
      if (!room.is_same(target.step()) && !room.is_same(target.momentum_buffer())) {
        detail::check_fits(*saved, room, key, describe(params[i]));
        at::Tensor(room).copy_(*saved);
      }
    }
  }
}

std::function<void()> NaturalGradient::read_more(torch::serialize::InputArchive& archive) {
  return [this] { forget_captures(); };
}

}  // namespace torchium::optim
