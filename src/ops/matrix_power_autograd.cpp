// The derivative of matrix_power.
#include "ops/refuse_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

namespace torchium::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <typename Function>
auto typed_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

// The gradient as a node of its own, so that the error comes when it is differentiated, not when
// create_graph=True is set.
class MatrixPowerBackward : public torch::autograd::Function<MatrixPowerBackward> {
 public:
  static Tensor forward(AutogradContext*, const Tensor& grad, const Tensor& /*A: for the graph*/,
                        const Tensor& values, const Tensor& vectors, double exponent,
                        double relative_eps) {
    static const auto op =
        typed_op<Tensor(const Tensor&, const Tensor&, const Tensor&, double, double)>(
            "torchium::_matrix_power_backward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(grad, values, vectors, exponent, relative_eps);
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false,
                "torchium::matrix_power can be differentiated once only. For second derivatives "
                "compose it from torch.linalg.eigh.");
  }
};

class MatrixPower : public torch::autograd::Function<MatrixPower> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& A, double exponent, double eps,
                        double relative_eps) {
    static const auto op =
        typed_op<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, double, double, double)>(
            "torchium::_matrix_power");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [power, values, vectors] = op.call(A, exponent, eps, relative_eps);
    ctx->save_for_backward({A, values, vectors});
    ctx->saved_data["exponent"] = exponent;
    ctx->saved_data["relative_eps"] = relative_eps;
    return power;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {MatrixPowerBackward::apply(grads[0], saved[0], saved[1], saved[2],
                                       ctx->saved_data["exponent"].toDouble(),
                                       ctx->saved_data["relative_eps"].toDouble()),
            Tensor(), Tensor(), Tensor()};
  }
};

Tensor matrix_power_autograd(const Tensor& A, double exponent, double eps, double relative_eps) {
  if (c10::GradMode::is_enabled() && A.requires_grad()) {
    return MatrixPower::apply(A, exponent, eps, relative_eps);
  }
  static const auto op =
      typed_op<Tensor(const Tensor&, double, double, double)>("torchium::matrix_power");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(A, exponent, eps, relative_eps);
}

constexpr char kRemedy[] = "Use matrix_power, which is differentiable.";

}  // namespace
}  // namespace torchium::ops

TORCH_LIBRARY_IMPL(torchium, Autograd, m) {
  using namespace torchium::ops;
  m.impl("matrix_power", matrix_power_autograd);
  m.impl("_matrix_power", refuse_gradients_kernel<kRemedy>());
  m.impl("_matrix_power_backward", refuse_gradients_kernel<kRemedy>());
}
