#include "torchium/optim/shampoo.h"

#include "gradients/capture/model_layers.h"
#include "optim/core/group_step.h"
#include "optim/core/model_groups.h"
#include "optim/core/option_checks.h"
#include "optim/core/option_fields.h"
#include "optim/shampoo/shampoo_memory.h"
#include "optim/shampoo/shampoo_plan.h"
#include "optim/shampoo/shampoo_rules.h"
#include "optim/shampoo/shampoo_step.h"

#include <c10/util/irange.h>

#include <cmath>
#include <utility>

namespace torchium::optim {
namespace {

const ShampooOptions& shampoo_options(const torch::optim::OptimizerOptions& options) {
  const auto* result = dynamic_cast<const ShampooOptions*>(&options);
  TORCH_CHECK_VALUE(result != nullptr, "a parameter group of Shampoo needs ShampooOptions");
  return *result;
}

bool uses_second_moment(const ShampooOptions& o) {
  return o.grafting().has_value() && *o.grafting() != "sgd";
}

// Bytes of the tensors that are there.
StateMemory state_memory(const SecondOrderParamState& state) {
  const std::pair<std::string, int64_t StateMemory::*> kinds[] = {
      {"statistics", &StateMemory::statistics},
      {"root_failures", &StateMemory::counters},
      {"roots", &StateMemory::roots},
      {"step", &StateMemory::counters},
      {"exp_avg_start", &StateMemory::counters},
      {"grafting_second_moment_start", &StateMemory::counters},
      {"diagonal", &StateMemory::diagonals},
      {"exp_avg", &StateMemory::averages},
      {"grafting_second_moment", &StateMemory::grafting_second_moments},
      {"momentum_buffer", &StateMemory::momentum_buffers}};
  StateMemory memory;
  for (const auto& [key, tensor] : state.tensors()) {
    const std::string name = key.substr(0, key.find('.'));  // "roots.0" -> "roots"
    for (const auto& [kind, member] : kinds) {
      if (name == kind) {
        memory.*member += static_cast<int64_t>(tensor.nbytes());
      }
    }
  }
  return memory;
}

}  // namespace

ShampooOptions::ShampooOptions(double lr) : lr_(lr) {}

double ShampooOptions::get_lr() const { return lr(); }
void ShampooOptions::set_lr(const double lr) { this->lr(lr); }

void ShampooOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(archive, *this);
}
void ShampooOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(archive, *this);
}

bool operator==(const ShampooOptions& lhs, const ShampooOptions& rhs) {
  return detail::equal_options(lhs, rhs);
}

std::unique_ptr<torch::optim::OptimizerParamState> ShampooParamState::clone() const {
  return std::make_unique<ShampooParamState>(*this);
}

bool ShampooParamState::consists_of(const detail::ParameterState& tensors) const {
  return MatrixParamState::consists_of(tensors) && diagonal().is_same(tensors.diagonal) &&
         exp_avg().is_same(tensors.exp_avg) && exp_avg_start().is_same(tensors.exp_avg_start) &&
         grafting_second_moment().is_same(tensors.grafting_second_moment) &&
         grafting_second_moment_start().is_same(tensors.grafting_second_moment_start) &&
         momentum_buffer().is_same(tensors.momentum_buffer);
}

std::vector<SecondOrderParamState::NamedTensor> ShampooParamState::parameter_shaped() {
  return {{"diagonal", &diagonal()},
          {"exp_avg", &exp_avg()},
          {"grafting_second_moment", &grafting_second_moment()},
          {"momentum_buffer", &momentum_buffer()}};
}

std::vector<SecondOrderParamState::NamedTensor> ShampooParamState::counts() {
  return {{"exp_avg_start", &exp_avg_start()},
          {"grafting_second_moment_start", &grafting_second_moment_start()}};
}

Shampoo::Shampoo(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 ShampooOptions defaults)
    : BlockedOptimizer(std::make_unique<ShampooOptions>(std::move(defaults))) {
  initialize(param_groups);
}

Shampoo::Shampoo(std::vector<at::Tensor> params, ShampooOptions defaults)
    : Shampoo({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

Shampoo::Shampoo(const torch::nn::Module& model, ShampooOptions defaults)
    : BlockedOptimizer(std::make_unique<ShampooOptions>(defaults)),
      layers_(std::make_shared<gradients::detail::ModelLayers>(model)) {
  initialize(detail::model_groups(model, defaults));
}

void Shampoo::check_options(const Options& options) const {
  const auto& o = shampoo_options(options);
  detail::check_learning_rate(o.lr());
  detail::check_at_least_zero("eps", o.eps());
  detail::check_at_least_one("update_freq", o.update_freq());
  detail::check_at_least_zero("weight_decay", o.weight_decay());
  detail::check_rate("betas[0]", std::get<0>(o.betas()), /*one_allowed=*/false);
  detail::check_rate("betas[1]", std::get<1>(o.betas()), /*one_allowed=*/true);
  detail::check_rate("momentum", o.momentum(), /*one_allowed=*/false);
  TORCH_CHECK_VALUE(!o.nesterov() || o.momentum() > 0.0,
                    "nesterov = true needs momentum > 0, got momentum = ", o.momentum());
  detail::check_at_least_zero("relative_eps", o.relative_eps());
  detail::check_at_least_one("block_size", o.block_size());
  TORCH_CHECK_VALUE(!o.exponent() || (std::isfinite(*o.exponent()) && *o.exponent() < 0.0),
                    "exponent must be a finite number below 0, got ", *o.exponent());
  TORCH_CHECK_VALUE(o.exponent_warmup() >= 0, "exponent_warmup must be at least 0, got ",
                    o.exponent_warmup());
  detail::check_choice("preconditioner_1d", o.preconditioner_1d(), {"diagonal", "full"});
  if (o.max_preconditioned_dim()) {
    detail::check_at_least_one("max_preconditioned_dim", *o.max_preconditioned_dim());
  }
  if (o.grafting()) {
    detail::check_choice("grafting", *o.grafting(), {"sgd", "adagrad", "rmsprop", "adam"});
  }
  detail::check_at_least_zero("grafting_eps", o.grafting_eps());
  if (o.grafting_beta2()) {
    detail::check_rate("grafting_beta2", *o.grafting_beta2(), /*one_allowed=*/false);
  }
  detail::check_at_least_one("start_preconditioning_step", o.start_preconditioning_step());
  detail::check_choice("root_method", o.root_method(), {"auto", "eigh", "newton"});
  if (o.root_dtype()) {
    detail::check_choice("root_dtype", *o.root_dtype(), {"bfloat16"});
  }
  if (o.matmul_precision()) {
    detail::check_choice("matmul_precision", *o.matmul_precision(), {"highest", "high"});
  }
  detail::check_at_least_one("max_root_failures", o.max_root_failures());
  detail::check_choice("graphs", o.graphs(), {"auto", "always", "never"});
}

std::unique_ptr<SecondOrderParamState> Shampoo::make_empty_state() const {
  return std::make_unique<ShampooParamState>();
}

void Shampoo::init_parameter_shaped(const Options& options, const at::Tensor& param,
                                    SecondOrderParamState& state) const {
  const auto h = detail::hyperparameters(shampoo_options(options));
  if (detail::rule_of_shape(h, param.sizes()) == detail::ParameterRule::kDiagonal) {
    static_cast<ShampooParamState&>(state).diagonal(detail::parameter_shaped_zeros(param));
  }
}

detail::BlockStorage Shampoo::init_storage(const Options& options, at::TensorList params) const {
  return detail::shampoo_init_state(detail::hyperparameters(shampoo_options(options)), params);
}

void Shampoo::check_state(const Options& options, const at::Tensor& param,
                          const SecondOrderParamState& found) const {
  const auto& o = shampoo_options(options);
  const auto h = detail::hyperparameters(o);
  const auto& state = static_cast<const ShampooParamState&>(found);
  const auto rule = detail::rule_of_shape(h, param.sizes());
  TORCH_CHECK_VALUE(
      state.statistics().empty() == (rule != detail::ParameterRule::kMatrices) &&
          state.diagonal().defined() == (rule == detail::ParameterRule::kDiagonal),
      describe(param), " has state of another rule than its options ask for now (",
      detail::describe_rule(h, param.sizes()).rule,
      "): preconditioned, max_preconditioned_dim, preconditioner_1d and, without matrices, "
      "grafting cannot change after its first step; set them back");
  TORCH_CHECK_VALUE(
      rule != detail::ParameterRule::kGrafted || state.grafting_second_moment().defined(),
      "grafting_second_moment is missing from the state of ", describe(param),
      ", which takes the direction of grafting = '", o.grafting().value_or("none"),
      "' by the options of its group (", detail::describe_rule(h, param.sizes()).detail, ")");
}

std::string Shampoo::describe(const at::Tensor& param) const {
  const auto* place = layers_ && param.defined() ? layers_->find(param) : nullptr;
  const std::string position = BlockedOptimizer::describe(param);
  return place != nullptr ? "'" + place->name + "', " + position : position;
}

std::string Shampoo::layout(const Options& options) const {
  const auto& o = shampoo_options(options);
  return c10::str(
      "block_size = ", o.block_size(), ", merge_dims = ", o.merge_dims() ? "true" : "false",
      ", preconditioner_1d = '", o.preconditioner_1d(),
      "', preconditioned = ", o.preconditioned() ? "true" : "false", ", max_preconditioned_dim = ",
      o.max_preconditioned_dim() ? std::to_string(*o.max_preconditioned_dim()) : "none",
      ", grafting = ", o.grafting().value_or("none"),
      ", root_dtype = ", o.root_dtype().value_or("none"));
}

bool Shampoo::equal_but_lr(const Options& a, const Options& b) const {
  return detail::equal_but_lr(shampoo_options(a), shampoo_options(b));
}

std::vector<std::string> Shampoo::needed_buffers(const Options& options) const {
  const auto& o = shampoo_options(options);
  std::vector<std::string> needed;
  if (std::get<0>(o.betas()) > 0.0) {
    needed.push_back("exp_avg");
  }
  if (uses_second_moment(o)) {
    needed.push_back("grafting_second_moment");
  }
  if (o.momentum() > 0.0) {
    needed.push_back("momentum_buffer");
  }
  return needed;
}

bool Shampoo::begins_afresh(const std::string& key, const Options& before,
                            const Options& options) const {
  const auto sums = [](const Options& o) { return shampoo_options(o).grafting() == "adagrad"; };
  return key == "grafting_second_moment" && sums(before) != sums(options);
}

c10::intrusive_ptr<detail::StepPlan> Shampoo::make_plan(c10::Device device) const {
  return c10::make_intrusive<detail::ShampooPlan>(device);
}

void Shampoo::update_preconditioners() { renew_all_roots(); }

void Shampoo::sync_lr() { sync_learning_rates(); }

MemoryReport Shampoo::memory_report() const {
  MemoryReport report;
  for (const auto i : c10::irange(param_groups_.size())) {
    const auto& group = param_groups_[i];
    const auto h = detail::hyperparameters(shampoo_options(group.options()));
    GroupMemory memory;
    std::vector<at::Tensor> planned;  // will have state
    for (const auto& param : group.params()) {
      const SecondOrderParamState* state = find_state(param);
      if (state != nullptr) {
        memory.state += state_memory(*state);
      } else if (param.requires_grad()) {
        planned.push_back(param);
      } else {
        continue;
      }
      memory.elements += param.numel();
      memory.parameters += static_cast<int64_t>(param.nbytes());
    }
    memory.state += detail::shampoo_state_memory(h, planned);
    memory.graphs = graph_bytes(i);
    report.groups.push_back(memory);
  }
  return report;
}

ShampooReport Shampoo::report() const {
  ShampooReport report;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto h = detail::hyperparameters(shampoo_options(param_groups_[group].options()));
    for (const auto& param : param_groups_[group].params()) {
      const auto* place = layers_ ? layers_->find(param) : nullptr;
      ParameterReport line{.name = place != nullptr ? place->name : place_of(param),
                           .shape = param.sizes().vec(),
                           .group = group,
                           .rule = "none",
                           .detail = "requires no gradient"};
      const SecondOrderParamState* state = find_state(param);
      if (state != nullptr || param.requires_grad()) {
        auto text = detail::describe_rule(h, param.sizes());
        line.rule = std::move(text.rule);
        line.detail = std::move(text.detail);
        line.state_bytes =
            (state != nullptr ? state_memory(*state) : detail::shampoo_state_memory(h, {param}))
                .total();
      }
      report.parameters.push_back(std::move(line));
    }
  }
  return report;
}

int64_t Shampoo::max_root_failures(const Options& options) const {
  return shampoo_options(options).max_root_failures();
}

bool Shampoo::capturable(const Options& options) const {
  return shampoo_options(options).capturable();
}

const char* Shampoo::root_remedy() const {
  return "raise eps or relative_eps, set root_method to 'eigh', or clip gradients so large that "
         "statistics overflow";
}

}  // namespace torchium::optim
