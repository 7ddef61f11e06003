#include "torchium/optim/kfac_preconditioner.h"

#include "optim/core/schedules.h"
#include "optim/kfac/kfac_preconditioner_options.h"
#include "optim/kfac/kfac_preconditioner_plan.h"

#include <c10/util/irange.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torchium::optim {

KFACPreconditionerOptions::KFACPreconditionerOptions(double lr) : lr_(lr) {}

template struct OptionsOf<KFACPreconditionerOptions>;

KFACOptions kfac_options(const KFACPreconditionerOptions& o) {
  return KFACOptions(o.lr())
      .momentum(0.0)
      .weight_decay(0.0)
      .damping(o.damping())
      .TCov(o.factor_update_steps())
      .TInv(o.inv_update_steps())
      .batch_averaged(o.batch_averaged())
      .eps(o.eps())
      .stat_decay(o.factor_decay())
      .kl_clip(o.kl_clip())
      .damping_split(o.damping_split())
      .ekfac(o.ekfac())
      .solver(o.solver())
      .structures(o.structures())
      .block_size(o.block_size())
      .alpha1(o.alpha1())
      .fisher(o.fisher())
      .weight_sharing(o.weight_sharing())
      .max_factor_size(o.max_factor_size())
      .factor_dtype(o.factor_dtype())
      .grad_worker_fraction(o.grad_worker_fraction())
      .skip_layers(o.skip_layers());
}

KFACPreconditioner::KFACPreconditioner(const torch::nn::Module& model,
                                       KFACPreconditionerOptions defaults)
    : KFAC(model, std::make_unique<KFACPreconditionerOptions>(std::move(defaults))) {
  initialize_with_model();
}

KFACPreconditioner::KFACPreconditioner(
    const torch::nn::Module& model,
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    KFACPreconditionerOptions defaults)
    : KFAC(model, std::make_unique<KFACPreconditionerOptions>(std::move(defaults))) {
  initialize(param_groups);
}

KFACPreconditioner::~KFACPreconditioner() = default;
KFACPreconditioner::KFACPreconditioner(KFACPreconditioner&&) noexcept = default;
KFACPreconditioner& KFACPreconditioner::operator=(KFACPreconditioner&&) noexcept = default;

namespace detail {
namespace {

// Whether two of its elements may have one address. True for some layouts of which it is not known.
bool may_overlap(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (const auto d : c10::irange(tensor.dim())) {
    if (tensor.size(d) > 1) {
      dims.emplace_back(tensor.stride(d), tensor.size(d));
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t last = 0;  // address of the last element of the dimensions so far
  for (const auto& [stride, size] : dims) {
    if (stride <= last) {
      return true;
    }
    last += stride * (size - 1);
  }
  return false;
}

}  // namespace

void KfacPreconditionerPlan::check(const std::vector<size_t>& active) {
  KfacPlan::check(active);
  for (const size_t i : active) {
    const at::Tensor& grad = param(i).grad();
    TORCH_CHECK_VALUE(!grad.defined() || !may_overlap(grad), "elements of the gradient of ",
                      name(i), " share memory (shape ", grad.sizes(), ", strides ", grad.strides(),
                      "), but ", optimizer_name(), " writes to it; assign a copy, p.grad.clone()");
  }
}

}  // namespace detail

void KFACPreconditioner::follow_schedules() {
  detail::follow_schedules<KFACPreconditionerOptions>(name(), param_groups_,
                                                      [&] { return next_steps(); });
}

void KFACPreconditioner::check_together(const std::vector<const Options*>& groups) const {
  SecondOrderOptimizer::check_together(groups);
  detail::check_same_in_all<KFACPreconditionerOptions>(name(), groups,
                                                       /*compares_functions=*/false);
  check_as_in_defaults<KFACPreconditionerOptions>(defaults(), groups);
}

c10::intrusive_ptr<detail::JointPlan> KFACPreconditioner::make_plan() const {
  auto plan = c10::make_intrusive<detail::KfacPreconditionerPlan>();
  plan->set_grad_worker_fraction(
      detail::options_as<KFACPreconditionerOptions>(defaults(), name()).grad_worker_fraction());
  return plan;
}

std::vector<std::string> KFACPreconditioner::skip_layers_of(const Options& options) const {
  return detail::options_as<KFACPreconditionerOptions>(options, name()).skip_layers();
}

}  // namespace torchium::optim
