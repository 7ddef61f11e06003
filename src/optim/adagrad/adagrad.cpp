#include "torchium/optim/adagrad.h"

#include "optim/adagrad/adagrad_plan.h"
#include "optim/core/group_step.h"
#include "optim/core/option_checks.h"
#include "optim/core/option_fields.h"

#include <utility>

namespace torchium::optim {
namespace {

const AdagradOptions& adagrad_options(const torch::optim::OptimizerOptions& options) {
  const auto* result = dynamic_cast<const AdagradOptions*>(&options);
  TORCH_CHECK_VALUE(result != nullptr, "a parameter group of Adagrad needs AdagradOptions");
  return *result;
}

}  // namespace

AdagradOptions::AdagradOptions(double lr) : lr_(lr) {}

double AdagradOptions::get_lr() const { return lr(); }
void AdagradOptions::set_lr(const double lr) { this->lr(lr); }

void AdagradOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(archive, *this);
}
void AdagradOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(archive, *this);
}

bool operator==(const AdagradOptions& lhs, const AdagradOptions& rhs) {
  return detail::equal_options(lhs, rhs);
}

std::unique_ptr<torch::optim::OptimizerParamState> AdagradParamState::clone() const {
  return std::make_unique<AdagradParamState>(*this);
}

std::vector<SecondOrderParamState::NamedTensor> AdagradParamState::parameter_shaped() {
  return {{"sum", &sum()}};
}

bool AdagradParamState::consists_of(const detail::ParameterState& tensors) const {
  return MatrixParamState::consists_of(tensors) && sum().is_same(tensors.sum);
}

Adagrad::Adagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 AdagradOptions defaults)
    : BlockedOptimizer(std::make_unique<AdagradOptions>(std::move(defaults))) {
  initialize(param_groups);
}

Adagrad::Adagrad(std::vector<at::Tensor> params, AdagradOptions defaults)
    : Adagrad({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

void Adagrad::check_options(const Options& options) const {
  const auto& o = adagrad_options(options);
  detail::check_learning_rate(o.lr());
  detail::check_at_least_zero("lr_decay", o.lr_decay());
  detail::check_at_least_zero("weight_decay", o.weight_decay());
  detail::check_at_least_zero("initial_accumulator_value", o.initial_accumulator_value());
  detail::check_at_least_zero("eps", o.eps());
  detail::check_at_least_one("block_size", o.block_size());
  detail::check_at_least_one("update_freq", o.update_freq());
  detail::check_choice("root_method", o.root_method(), {"auto", "eigh", "newton"});
}

std::unique_ptr<SecondOrderParamState> Adagrad::make_empty_state() const {
  return std::make_unique<AdagradParamState>();
}

void Adagrad::init_parameter_shaped(const Options& options, const at::Tensor& param,
                                    SecondOrderParamState& state) const {
  const auto& o = adagrad_options(options);
  if (!o.full_matrix()) {
    static_cast<AdagradParamState&>(state).sum(
        detail::parameter_shaped_zeros(param).fill_(o.initial_accumulator_value()));
  }
}

std::string Adagrad::layout(const Options& options) const {
  const auto& o = adagrad_options(options);
  return c10::str("full_matrix = ", o.full_matrix() ? "true" : "false",
                  ", block_size = ", o.block_size());
}

detail::BlockStorage Adagrad::init_storage(const Options& options, at::TensorList params) const {
  const auto& o = adagrad_options(options);
  if (!o.full_matrix()) {
    return {};
  }
  return detail::adagrad_init_state(params, o.block_size(), o.initial_accumulator_value());
}

bool Adagrad::equal_but_lr(const Options& a, const Options& b) const {
  return detail::equal_but_lr(adagrad_options(a), adagrad_options(b));
}

c10::intrusive_ptr<detail::StepPlan> Adagrad::make_plan(c10::Device device) const {
  return c10::make_intrusive<detail::AdagradPlan>(device);
}

const char* Adagrad::root_remedy() const {
  return "raise eps, set root_method to 'eigh', or clip gradients so large that their sum "
         "overflows";
}

}  // namespace torchium::optim
