#include "linalg/operators/parameter_derivatives.h"
#include <torchium/linalg/hessian.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace torchium::linalg {

LinearOperator detail::hvp_operator(const at::Tensor& loss, const std::vector<at::Tensor>& params) {
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "hvp_operator: loss_fn returns ",
                    loss.defined() ? at::str(loss.sizes()) : "an undefined tensor",
                    "; it must return a scalar.");
  TORCH_CHECK_VALUE(!loss.is_complex(), "hvp_operator: the loss that loss_fn returns is ",
                    c10::getDtypeNames(loss.scalar_type()).first, "; it must be real.");
  TORCH_CHECK_VALUE(
      loss.requires_grad(),
      "hvp_operator: the loss that loss_fn returns has no graph; compute it from params, "
      "without detach() and torch.no_grad().");
  const at::Tensor gradient = flat_gradient(loss, params, at::ones_like(loss));
  TORCH_CHECK_VALUE(gradient.defined(), "hvp_operator: the loss depends on none of params.");
  const bool one_by_one = has_group_norm(loss);
  const auto product = [gradient, params, one_by_one](const at::Tensor& X) {
    return flat_derivatives(gradient, params, X.mT(), one_by_one).mT();
  };
  return LinearOperator(gradient.numel(), product, gradient.options()).assume("symmetric");
}

LinearOperator hvp_operator(const std::function<at::Tensor()>& loss_fn,
                            const std::vector<at::Tensor>& params) {
  TORCH_CHECK_VALUE(loss_fn, "hvp_operator: loss_fn is empty.");
  detail::check_params("hvp_operator", params);
  const at::AutoGradMode enable_grad(true);
  return detail::hvp_operator(loss_fn(), params);
}

}  // namespace torchium::linalg
