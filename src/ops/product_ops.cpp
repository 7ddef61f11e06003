// Schemas, backends and derivatives of torchium/linalg/products.h, and its functions, which go
// through the dispatcher: autograd, fake tensors and torch.compile see the same operators from both
// languages.
#include "linalg/chunked_matmul.h"
#include "linalg/fused_mul_add.h"
#include "linalg/kronecker.h"
#include "linalg/spd.h"
#include "ops/refuse_gradients.h"
#include <torchium/linalg/products.h>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace torchium::linalg {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The operator `name`, with the signature of the function that is given.
template <typename Function>
auto find_operator(const char* name, Function*) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

constexpr char kUseSolve[] =
    "Call it under torch.no_grad(), detach() the argument, or use torch.linalg.solve.";
constexpr char kUseInverse[] =
    "Call it under torch.no_grad(), detach() the argument, or use torch.linalg.inv.";

// G = dL/d(A B) gives dL/dA = G B^T and dL/dB = A^T G, summed over broadcast dimensions.
class ChunkedMatmul : public torch::autograd::Function<ChunkedMatmul> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& A, const at::Tensor& B,
                            std::optional<int64_t> max_workspace_bytes) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({A, B});
    context->saved_data["max_workspace_bytes"] = max_workspace_bytes;
    return chunked_matmul(A, B, max_workspace_bytes);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto &A = saved[0], &B = saved[1], &G = grads[0];
    const auto limit = context->saved_data["max_workspace_bytes"].toOptional<int64_t>();
    at::Tensor grad_A, grad_B;
    if (!G.defined()) return {grad_A, grad_B, {}};
    if (context->needs_input_grad(0)) {
      grad_A = at::sum_to(chunked_matmul(G, B.mT(), limit), A.sym_sizes());
    }
    if (context->needs_input_grad(1)) {
      if (B.dim() == 2) {
        // The sum over the batch is part of the product: no [batch, k, n] is formed.
        grad_B = chunked_matmul(A.flatten(0, -2).mT(), G.flatten(0, -2), limit);
      } else {
        grad_B = at::sum_to(chunked_matmul(A.mT(), G, limit), B.sym_sizes());
      }
    }
    return {grad_A, grad_B, {}};
  }
};

// G = dL/d(a b + c) gives dL/da = G b, dL/db = G a and dL/dc = G, summed over broadcast dimensions.
class FusedMulAdd : public torch::autograd::Function<FusedMulAdd> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, const at::Tensor& b,
                            const at::Tensor& c) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({a, b});
    context->saved_data["c_sizes"] = c.sym_sizes();
    context->saved_data["c_dtype"] = c.scalar_type();
    return fused_mul_add(a, b, c);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto &a = saved[0], &b = saved[1], &G = grads[0];
    variable_list result(3);
    if (!G.defined()) return result;
    if (context->needs_input_grad(0)) {
      result[0] = at::sum_to(G * b, a.sym_sizes()).to(a.scalar_type());
    }
    if (context->needs_input_grad(1)) {
      result[1] = at::sum_to(G * a, b.sym_sizes()).to(b.scalar_type());
    }
    if (context->needs_input_grad(2)) {
      result[2] = at::sum_to(G, context->saved_data["c_sizes"].toSymIntVector())
                      .to(context->saved_data["c_dtype"].toScalarType());
    }
    return result;
  }
};

at::Tensor chunked_matmul_autograd(const at::Tensor& A, const at::Tensor& B,
                                   std::optional<int64_t> max_workspace_bytes) {
  return ChunkedMatmul::apply(A, B, max_workspace_bytes);
}

at::Tensor fused_mul_add_autograd(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return FusedMulAdd::apply(a, b, c);
}

}  // namespace

at::Tensor kron(const at::Tensor& A, const at::Tensor& B) {
  static const auto op = find_operator("torchium::kron", &detail::kron);
  return op.call(A, B);
}

at::Tensor kron_matmul(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X) {
  static const auto op = find_operator("torchium::kron_matmul", &detail::kron_matmul);
  return op.call(A, B, X);
}

at::Tensor kron_solve(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                      double damping) {
  static const auto op = find_operator("torchium::kron_solve", &detail::kron_solve);
  return op.call(A, B, X, damping);
}

at::Tensor chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                          std::optional<int64_t> max_workspace_bytes) {
  static const auto op = find_operator("torchium::chunked_matmul", &detail::chunked_matmul);
  return op.call(A, B, max_workspace_bytes);
}

at::Tensor spd_inverse(const at::Tensor& A, double damping) {
  static const auto op = find_operator("torchium::spd_inverse", &detail::spd_inverse);
  return op.call(A, damping);
}

at::Tensor spd_solve(const at::Tensor& A, const at::Tensor& X, double damping) {
  static const auto op = find_operator("torchium::spd_solve", &detail::spd_solve);
  return op.call(A, X, damping);
}

at::Tensor fused_mul_add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  static const auto op = find_operator("torchium::fused_mul_add", &detail::fused_mul_add);
  return op.call(a, b, c);
}

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  // Made of differentiable operators: one implementation for every backend and for autograd.
  m.def("kron(Tensor A, Tensor B) -> Tensor", &detail::kron);
  m.def("kron_matmul(Tensor A, Tensor B, Tensor X) -> Tensor", &detail::kron_matmul);

  m.def("kron_solve(Tensor A, Tensor B, Tensor X, float damping) -> Tensor");
  m.def("chunked_matmul(Tensor A, Tensor B, *, int? max_workspace_bytes=None) -> Tensor");
  m.def("spd_inverse(Tensor A, *, float damping=0.0) -> Tensor");
  m.def("spd_solve(Tensor A, Tensor X, *, float damping=0.0) -> Tensor");
  m.def("fused_mul_add(Tensor a, Tensor b, Tensor c) -> Tensor");
}

// Made of ATen's operators, so for every backend; sparse tensors get here too, and are refused by
// name.
TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("kron_solve", &detail::kron_solve);
  m.impl("chunked_matmul", &detail::chunked_matmul);
  m.impl("spd_inverse", &detail::spd_inverse);
  m.impl("spd_solve", &detail::spd_solve);
  m.impl("fused_mul_add", &detail::fused_mul_add);
}

TORCH_LIBRARY_IMPL(torchium, Meta, m) {
  m.impl("kron_solve", &detail::kron_solve_meta);
  m.impl("chunked_matmul", &detail::chunked_matmul_meta);
  m.impl("spd_inverse", &detail::spd_inverse_meta);
  m.impl("spd_solve", &detail::spd_solve_meta);
}

TORCH_LIBRARY_IMPL(torchium, Autograd, m) {
  m.impl("kron_solve", ops::refuse_gradients_kernel<kUseSolve>());
  m.impl("chunked_matmul", &chunked_matmul_autograd);
  m.impl("spd_inverse", ops::refuse_gradients_kernel<kUseInverse>());
  m.impl("spd_solve", ops::refuse_gradients_kernel<kUseSolve>());
  m.impl("fused_mul_add", &fused_mul_add_autograd);
}

}  // namespace torchium::linalg
