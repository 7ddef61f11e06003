#include "optim/core/argument_checks.h"

#include "optim/core/parameter_state.h"
#include "optim/core/step_status.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {
void check_parameters(at::TensorList params, const std::vector<at::Tensor>& steps,
                      const at::Tensor& status) {
  TORCH_CHECK_VALUE(steps.size() == params.size(), "one step count per parameter is needed, got ",
                    params.size(), " params and ", steps.size(), " steps");
  TORCH_CHECK_VALUE(status.defined() && status.scalar_type() == at::kLong &&
                        status.numel() == kStatusSize && status.is_contiguous(),
                    "status must be a contiguous int64 tensor of ", kStatusSize, " elements");
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_VALUE(params[i].device() == status.device() && steps[i].device() == status.device(),
                      "a call works on one device: params[", i, "] is on ", params[i].device(),
                      ", its step count on ", steps[i].device(), ", status on ", status.device(),
                      "; call it once per device");
    TORCH_CHECK_VALUE(steps[i].scalar_type() == at::kDouble && steps[i].numel() == 1, "steps[", i,
                      "] must be one float64 number, got ", steps[i].scalar_type(), " of shape ",
                      steps[i].sizes());
  }
}

at::Tensor signed_gradient(const at::Tensor& param, const at::Tensor& grad, bool maximize,
                           double weight_decay, const FoundInfGuard& guard) {
  at::Tensor g = grad.to(state_dtype(param));
  if (maximize) {
    g = g.neg();
  }
  if (weight_decay != 0.0) {
    g = g.add(param.to(g.scalar_type()), weight_decay);
  }
  return guard.zero_if_skipped(g);
}

int64_t step_on_host(const at::Tensor& step, at::IntArrayRef host_steps, size_t param) {
  return host_steps.empty() ? static_cast<int64_t>(count_on_cpu(step)) : host_steps[param] + 1;
}

}  // namespace torchium::optim::detail
