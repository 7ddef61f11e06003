#include "torchium/optim/second_order_optimizer.h"

#include "distributed/communicator.h"
#include "optim/core/failure_message.h"
#include "optim/core/parameter_state.h"
#include "optim/core/state_checks.h"
#include "optim/core/step_monitor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace torchium::optim {
SecondOrderOptimizer::SecondOrderOptimizer(std::unique_ptr<Options> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)) {}

SecondOrderOptimizer::~SecondOrderOptimizer() = default;
SecondOrderOptimizer::SecondOrderOptimizer(SecondOrderOptimizer&&) noexcept = default;
SecondOrderOptimizer& SecondOrderOptimizer::operator=(SecondOrderOptimizer&&) noexcept = default;

void SecondOrderOptimizer::refuse_moved_from() const {
  TORCH_CHECK(defaults_ != nullptr,
              "this optimizer was moved from and holds nothing; use the one that it was moved to");
}

void SecondOrderOptimizer::initialize(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  own_options(defaults()).check();
  for (const auto& group : param_groups) {
    add_param_group(group);
  }
}

void SecondOrderOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  refuse_moved_from();
  const auto& params = param_group.params();
  const Options& options = param_group.has_options() ? param_group.options() : defaults();
  check_group(options, params, param_groups_.size());
  auto all_options = options_of_groups();
  all_options.push_back(&options);
  check_together(all_options);
  std::unordered_set<const void*> known;
  for (const auto& group : param_groups_) {
    for (const auto& param : group.params()) {
      known.insert(param.unsafeGetTensorImpl());
    }
  }
  for (const auto i : c10::irange(params.size())) {
    TORCH_CHECK_VALUE(params[i].is_leaf(), "parameter ", i, " of group ", param_groups_.size(),
                      " is not a leaf of the autograd graph; optimize the tensors it is made of");
    TORCH_CHECK_VALUE(known.insert(params[i].unsafeGetTensorImpl()).second, "parameter ", i,
                      " of group ", param_groups_.size(),
                      " is in the optimizer already; pass each parameter once");
  }
  Optimizer::add_param_group(param_group);
  if (param_group.has_options()) {  // newer versions of libtorch mix them with the defaults
    param_groups_.back().set_options(param_group.options().clone());
  }
}

void SecondOrderOptimizer::check_group(const Options& options,
                                       const std::vector<at::Tensor>& params, size_t group) const {
  own_options(options).check();
  for (const auto i : c10::irange(params.size())) {
    TORCH_CHECK_VALUE(params[i].defined(), "parameter ", i, " of group ", group, " is undefined");
    detail::check_parameter(params[i], detail::parameter_name(group, i, "", params[i]));
  }
}

void SecondOrderOptimizer::check_groups() const {
  for (const auto group : c10::irange(param_groups_.size())) {
    check_group(param_groups_[group].options(), param_groups_[group].params(), group);
  }
  check_together(options_of_groups());
}

void SecondOrderOptimizer::check_together(const std::vector<const Options*>& groups) const {
  const auto ranks = ranks_of(defaults());
  for (const Options* options : groups) {
    const auto own = ranks_of(*options);
    TORCH_CHECK_VALUE(
        own == nullptr || (ranks != nullptr && own->is_same_group_as(*ranks)),
        "process_group of a parameter group differs from that of the optimizer; set it "
        "in the defaults alone");
  }
}

const OwnOptions& SecondOrderOptimizer::own_options(const Options& options) const {
  TORCH_CHECK_VALUE(typeid(options) == typeid(defaults()), "a parameter group of ", name(),
                    " needs ", name(), "Options");
  return dynamic_cast<const OwnOptions&>(options);
}

std::shared_ptr<const distributed::Communicator> SecondOrderOptimizer::ranks_of(
    const Options& options) {
  const auto* shared = dynamic_cast<const SharedOptions*>(&options);
  return shared == nullptr ? nullptr : shared->ranks();
}

std::vector<const SecondOrderOptimizer::Options*> SecondOrderOptimizer::options_of_groups() const {
  std::vector<const Options*> options;
  for (const auto& group : param_groups_) {
    options.push_back(&group.options());
  }
  return options;
}

at::Tensor SecondOrderOptimizer::step(LossClosure closure) {
  refuse_moved_from();
  const at::NoGradGuard no_grad;
  try {
    read_reports(/*wait=*/false);
  } catch (...) {
    withdraw();
    throw;
  }
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  take_step();
  read_reports(/*wait=*/false);
  return loss;
}

void SecondOrderOptimizer::check_errors() {
  refuse_moved_from();
  read_reports(/*wait=*/true);
}

void SecondOrderOptimizer::raise_failure(size_t group, const detail::StepReport& report) const {
  if (group >= param_groups_.size()) {  // removed in the meantime
    return;
  }
  const at::Tensor& non_finite = report.non_finite_parameter;
  const SecondOrderParamState* state = non_finite.defined() ? find_state(non_finite) : nullptr;
  const auto described = [&](const at::Tensor& param) {
    const auto place = find_place(param);
    return place ? describe(place->first, place->second) : "a parameter";
  };
  const std::string message =
      detail::failure_message(name(),
                              {.skips = report.entries[detail::kConsecutiveSkips],
                               .non_finite = non_finite,
                               .step = state != nullptr ? state->step() : at::Tensor(),
                               .non_finite_name = described(non_finite),
                               .root_failures = report.entries[detail::kConsecutiveRootFailures],
                               .failed_name = described(report.failed_parameter)},
                              max_root_failures(param_groups_[group].options()));
  TORCH_CHECK(message.empty(), message);
}

SecondOrderParamState* SecondOrderOptimizer::find_state(const at::Tensor& param) const {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : static_cast<SecondOrderParamState*>(found->second.get());
}

std::string SecondOrderOptimizer::place_of(const at::Tensor& param) const {
  const auto place = find_place(param);
  return place ? c10::str("parameter ", place->second, " of group ", place->first) : "a parameter";
}

std::string SecondOrderOptimizer::describe(size_t group, size_t position) const {
  const at::Tensor& param = param_groups_[group].params()[position];
  return detail::parameter_name(group, position, name_in_model(param), param);
}

std::optional<std::pair<size_t, size_t>> SecondOrderOptimizer::find_place(
    const at::Tensor& param) const {
  for (const auto group : c10::irange(param_groups_.size())) {
    const auto& params = param_groups_[group].params();
    for (const auto i : c10::irange(params.size())) {
      if (params[i].is_same(param)) {
        return std::pair(group, i);
      }
    }
  }
  return std::nullopt;
}

}  // namespace torchium::optim
