// The derivative of matrix_power, in reverse and in forward mode.
#include "ops/derivative.h"
#include "ops/find_operator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

namespace torchium::ops {
namespace {

using at::Tensor;
using PowerTuple = std::tuple<Tensor, Tensor, Tensor>;
using HalfFunction = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                            double);

Derivative power_derivative(double exponent, double relative_eps) {
  // saved: A, eigenvalues, eigenvectors.
  const auto backward = [=](const Tensor& gradient, const variable_list& saved,
                            const std::vector<bool>&) -> variable_list {
    static const auto op = find_operator<HalfFunction>("_matrix_power_backward");
    return {op.call(gradient, saved[0], saved[1], saved[2], exponent, relative_eps)};
  };
  const auto forward = [=](const variable_list& tangents, const variable_list& saved) {
    static const auto op = find_operator<HalfFunction>("_matrix_power_forward");
    return op.call(tangents[0], saved[0], saved[1], saved[2], exponent, relative_eps);
  };
  return {"MatrixPowerBackward", backward, forward};
}

Tensor matrix_power_autograd(const Tensor& A, double exponent, double eps, double relative_eps) {
  static const auto power_alone =
      find_operator<Tensor(const Tensor&, double, double, double)>("matrix_power");
  static const auto power_and_spectrum =
      find_operator<PowerTuple(const Tensor&, double, double, double)>("_matrix_power");
  Tensor power, values, vectors;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (!needs_derivative({A})) {
      return power_alone.call(A, exponent, eps, relative_eps);
    }
    std::tie(power, values, vectors) = power_and_spectrum.call(A, exponent, eps, relative_eps);
  }
  return with_derivative(power, {A}, {A, values, vectors},
                         power_derivative(exponent, relative_eps));
}

constexpr char kOnce[] =
    "torchium::matrix_power can be differentiated once only. For second derivatives compose it "
    "from torch.linalg.eigh.";

// Boxed kernel of the parts of the derivative. An error comes when one is differentiated in turn,
// not when create_graph=True is set or when A requires grad further outside.
void differentiated_once(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  variable_list inputs;
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) {
      inputs.push_back(argument.toTensor());
      TORCH_CHECK(!has_tangent(inputs.back()), kOnce);
    }
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(stack);
  }
  variable_list outputs;
  for (const c10::IValue& output : torch::jit::last(*stack, op.schema().returns().size())) {
    outputs.push_back(output.toTensor());
  }
  refuse_backward(inputs, outputs, kOnce);
}

}  // namespace
}  // namespace torchium::ops

TORCH_LIBRARY_IMPL(torchium, Autograd, m) {
  using namespace torchium::ops;
  m.impl("matrix_power", matrix_power_autograd);
  for (const char* name : {"_matrix_power", "_matrix_power_backward", "_matrix_power_forward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&differentiated_once>());
  }
}
