#include <torchium/linalg/hessian.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <utility>

namespace torchium::linalg {
namespace {

void check_params(const std::vector<at::Tensor>& params) {
  TORCH_CHECK_VALUE(!params.empty(), "hvp_operator: params is empty.");
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& p = params[i];
    TORCH_CHECK_VALUE(p.requires_grad(), "hvp_operator: params[", i,
                      "] does not require gradients; leave it out.");
    const auto is_p = [&](const at::Tensor& other) { return other.is_same(p); };
    TORCH_CHECK_VALUE(std::none_of(params.begin(), params.begin() + i, is_p),
                      "hvp_operator: params[", i, "] is in params twice.");
    TORCH_CHECK_VALUE(
        p.scalar_type() == params[0].scalar_type() && p.device() == params[0].device(),
        "hvp_operator: params must be of one dtype and on one device.");
  }
}

// Derivatives that do not exist are zero.
at::Tensor concatenated(const std::vector<at::Tensor>& derivatives,
                        const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < params.size(); ++i) {
    parts.push_back(
        (derivatives[i].defined() ? derivatives[i] : at::zeros_like(params[i])).flatten());
  }
  return at::cat(parts);
}

}  // namespace

LinearOperator hvp_operator(const std::function<at::Tensor()>& loss_fn,
                            const std::vector<at::Tensor>& params) {
  check_params(params);
  const at::AutoGradMode enable_grad(true);
  const at::Tensor loss = loss_fn();
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1,
                    "hvp_operator: loss_fn must return a scalar tensor.");
  TORCH_CHECK_VALUE(loss.requires_grad(),
                    "hvp_operator: the loss that loss_fn returns has no graph.");
  const std::vector<at::Tensor> found =
      torch::autograd::grad({loss}, params, {}, /*retain_graph=*/true, /*create_graph=*/true,
                            /*allow_unused=*/true);
  TORCH_CHECK_VALUE(std::any_of(found.begin(), found.end(), [](auto& g) { return g.defined(); }),
                    "hvp_operator: the loss depends on none of params.");
  const at::Tensor gradient = concatenated(found, params);
  const auto product = [gradient, params](const at::Tensor& X) {
    if (!gradient.requires_grad()) {  // a loss linear in all parameters
      return at::zeros_like(X);
    }
    std::vector<at::Tensor> columns;
    for (const at::Tensor& v : X.unbind(1)) {
      columns.push_back(
          concatenated(torch::autograd::grad({gradient}, params, {v}, /*retain_graph=*/true,
                                             /*create_graph=*/false, /*allow_unused=*/true),
                       params));
    }
    return at::stack(columns, 1);
  };
  return LinearOperator(gradient.numel(), product, gradient.options()).assume("symmetric");
}

}  // namespace torchium::linalg
