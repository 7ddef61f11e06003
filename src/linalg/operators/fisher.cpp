#include "linalg/operators/parameter_derivatives.h"
#include <torchium/linalg/fisher.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

namespace torchium::linalg {
namespace {

void check_losses(const at::Tensor& losses, const at::Tensor& outputs) {
  TORCH_CHECK_VALUE(losses.defined() && losses.dim() == 1 && losses.numel() > 0,
                    "fisher_operator: loss_fn must return the losses of N samples, a tensor [N]; "
                    "use reduction=\"none\".");
  TORCH_CHECK_VALUE(outputs.defined() && outputs.dim() > 0 && outputs.size(0) == losses.size(0),
                    "fisher_operator: the outputs must be a tensor [N, ...] with N = ",
                    losses.size(0), ", the number of losses.");
  TORCH_CHECK_VALUE(losses.requires_grad() && outputs.requires_grad(),
                    "fisher_operator: what loss_fn returns has no graph; compute it from params, "
                    "without detach() and torch.no_grad().");
}

}  // namespace

LinearOperator detail::fisher_operator(const SampleLosses& found,
                                       const std::vector<at::Tensor>& params,
                                       const std::string& fisher) {
  const bool is_ggn = fisher == "ggn";
  const at::Tensor z = is_ggn ? found.outputs : found.losses;
  check_losses(found.losses, z);
  const at::Tensor u = at::zeros_like(z).requires_grad_();
  const at::Tensor transposed = flat_gradient(z, params, u);  // J^T u
  TORCH_CHECK_VALUE(transposed.defined(), "fisher_operator: the losses depend on none of params.");
  at::Tensor slope;  // of the losses with respect to z
  if (is_ggn) {
    slope = torch::autograd::grad({found.losses.sum()}, {z}, {}, /*retain_graph=*/true,
                                  /*create_graph=*/true, /*allow_unused=*/true)[0];
    TORCH_CHECK_VALUE(slope.defined(), "fisher_operator: the losses do not depend on the outputs.");
  }
  const auto product = [=](const at::Tensor& X) {
    std::vector<int64_t> sizes = z.sizes().vec();
    sizes.insert(sizes.begin(), X.size(1));
    at::Tensor rows = flat_derivatives(transposed, {u}, X.mT()).view(sizes);  // J v
    if (slope.defined()) rows = flat_derivatives(slope, {z}, rows).view(sizes);
    return flat_derivatives(z, params, rows / z.size(0)).mT();
  };
  return LinearOperator(transposed.numel(), product, transposed.options())
      .assume("positive_semidefinite");
}

LinearOperator fisher_operator(const std::function<SampleLosses()>& loss_fn,
                               const std::vector<at::Tensor>& params, const std::string& fisher) {
  TORCH_CHECK_VALUE(loss_fn, "fisher_operator: loss_fn is empty.");
  TORCH_CHECK_VALUE(fisher == "empirical" || fisher == "ggn", "fisher_operator: fisher is \"",
                    fisher, "\"; it must be \"empirical\" or \"ggn\".");
  detail::check_params("fisher_operator", params);
  const at::AutoGradMode enable_grad(true);
  return detail::fisher_operator(loss_fn(), params, fisher);
}

}  // namespace torchium::linalg
