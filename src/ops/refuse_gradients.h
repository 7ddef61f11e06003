// Autograd kernel of operators without a derivative: an error instead of a silent detach.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

namespace torchium::ops {

// Boxed kernel: raises if a tensor argument requires grad while gradients are recorded, else calls
// the operator below autograd. Remedy: a char array at namespace scope, what to use instead.
template <const auto& Remedy>
void refuse_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (c10::GradMode::is_enabled()) {
    const auto& parameters = op.schema().arguments();
    const auto arguments = torch::jit::last(*stack, parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      TORCH_CHECK(!(arguments[i].isTensor() && arguments[i].toTensor().requires_grad()),
                  op.schema().name(), " has no derivative, but ", parameters[i].name(),
                  " requires grad. ", static_cast<const char*>(Remedy));
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(stack);
}

template <const auto& Remedy>
torch::CppFunction refuse_gradients_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&refuse_gradients<Remedy>>();
}

}  // namespace torchium::ops
