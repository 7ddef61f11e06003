// Autograd kernel of operators without a derivative: an error instead of a silent detach or zero.
#pragma once

#include "ops/derivative.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

namespace torchium::ops {

// Boxed kernel: raises if a tensor argument requires grad while gradients are recorded, or has a
// tangent of forward-mode differentiation; else calls the operator below autograd. Remedy: a char
// array at namespace scope, what to use instead.
template <const auto& Remedy>
void refuse_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& parameters = op.schema().arguments();
  const auto arguments = torch::jit::last(*stack, parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!arguments[i].isTensor()) {
      continue;
    }
    const at::Tensor& tensor = arguments[i].toTensor();
    const bool requires_grad = c10::GradMode::is_enabled() && tensor.requires_grad();
    TORCH_CHECK(!requires_grad && !has_tangent(tensor), op.schema().name(),
                " has no derivative, but ", parameters[i].name(),
                requires_grad ? " requires grad. " : " has a tangent. ",
                static_cast<const char*>(Remedy));
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(stack);
}

template <const auto& Remedy>
torch::CppFunction refuse_gradients_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&refuse_gradients<Remedy>>();
}

}  // namespace torchium::ops
