// Schemas, backends and derivatives of torchium/linalg/products.h, and its functions, which go
// through the dispatcher: autograd, fake tensors and torch.compile see the same operators from both
// languages.
#include "linalg/decompositions/spd.h"
#include "linalg/kronecker/kronecker.h"
#include "linalg/products/chunked_matmul.h"
#include "linalg/products/fused_mul_add.h"
#include "ops/derivative.h"
#include "ops/find_operator.h"
#include "ops/refuse_gradients.h"
#include "ops/registration.h"
#include <torchium/linalg/products.h>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torchium::linalg {
namespace {

using ops::call_operator;
using torch::autograd::variable_list;

constexpr char kUseSolve[] =
    "Call it under torch.no_grad(), detach() the argument, or use torch.linalg.solve.";
constexpr char kUseInverse[] =
    "Call it under torch.no_grad(), detach() the argument, or use torch.linalg.inv.";

// [..., k] -> [rows, k]. flatten would fail for batches of gradients (is_grads_batched).
at::Tensor rows(const at::Tensor& x) {
  const auto sizes = x.sym_sizes();
  return x.reshape_symint({c10::multiply_integers(sizes.slice(0, x.dim() - 1)), sizes.back()});
}

// G = dL/d(A B) gives dL/dA = G B^T and dL/dB = A^T G, summed over broadcast dimensions.
ops::Derivative chunked_matmul_derivative(std::optional<int64_t> limit,
                                          std::optional<std::string> precision) {
  const auto backward = [=](const at::Tensor& G, const variable_list& saved,
                            const std::vector<bool>& wanted) {
    const auto &A = saved[0], &B = saved[1];
    variable_list result(2);
    if (wanted[0]) {
      result[0] = at::sum_to(chunked_matmul(G, B.mT(), limit, precision), A.sym_sizes());
      result[0] = result[0].to(A.device());
    }
    if (wanted[1]) {
      // With one B the sum over the batch is part of the product: no [batch, k, n] is formed.
      result[1] = B.dim() == 2
                      ? chunked_matmul(rows(A).mT(), rows(G), limit, precision)
                      : at::sum_to(chunked_matmul(A.mT(), G, limit, precision), B.sym_sizes());
      result[1] = result[1].to(B.device());
    }
    return result;
  };
  const auto forward = [=](const variable_list& tangents, const variable_list& saved) {
    at::Tensor sum;
    if (tangents[0].defined()) {
      sum = chunked_matmul(tangents[0], saved[1], limit, precision);
    }
    if (tangents[1].defined()) {
      const at::Tensor term = chunked_matmul(saved[0], tangents[1], limit, precision);
      sum = sum.defined() ? sum + term : term;
    }
    return sum;
  };
  return {"ChunkedMatmulBackward", backward, forward};
}

at::Tensor chunked_matmul_autograd(const at::Tensor& A, const at::Tensor& B,
                                   std::optional<int64_t> max_workspace_bytes,
                                   std::optional<std::string_view> precision) {
  at::Tensor product;
  const auto kept = precision ? std::optional<std::string>(*precision) : std::nullopt;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    product = chunked_matmul(A, B, max_workspace_bytes, kept);
  }
  return ops::with_derivative(product, {A, B}, {A, B},
                              chunked_matmul_derivative(max_workspace_bytes, kept));
}

// torch's own operator is differentiable and computes the same.
at::Tensor fused_mul_add_autograd(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  if (ops::needs_derivative({a, b, c})) {
    return detail::fused_mul_add_by_torch(a, b, c);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return fused_mul_add(a, b, c);
}

// The lists in place: no derivative, but autograd sees that c changes.
void fused_mul_add_lists_autograd(at::TensorList a, at::TensorList b, at::TensorList c) {
  const bool records = c10::GradMode::is_enabled();
  for (const at::TensorList list : {a, b, c}) {
    for (const at::Tensor& entry : list) {
      if (entry.unsafeGetTensorImpl()->autograd_meta() == nullptr) continue;
      TORCH_CHECK(!(records && entry.requires_grad()) && !ops::has_tangent(entry),
                  "fused_mul_add_ has no derivative, but an entry requires grad or has a tangent. "
                  "Call it under torch.no_grad(), or use fused_mul_add.");
    }
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    fused_mul_add_(a, b, c);
  }
  for (const at::Tensor& entry : c) {
    if (!entry.is_inference()) entry.unsafeGetTensorImpl()->bump_version();
  }
}

void fused_mul_add_out_autograd(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                                at::Tensor& out) {
  TORCH_CHECK(!ops::needs_derivative({a, b, c, out}),
              "fused_mul_add with `out` has no derivative, but an operand requires grad or has a "
              "tangent. Call it under torch.no_grad(), or without `out`.");
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    fused_mul_add(a, b, c, out);
  }
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

// Python's lists of tensors are released without the interpreter's lock, and a tensor whose only
// other owner is Python takes the lock for that, which costs more than all else here. These
// references live until Python, which has the lock, frees this object.
struct TensorReferences : torch::CustomClassHolder {
  std::vector<at::Tensor> tensors;
};

void fused_mul_add_lists_keeping(at::TensorList a, at::TensorList b, at::TensorList c,
                                 const c10::intrusive_ptr<TensorReferences>& references) {
  auto& kept = references->tensors;
  kept.reserve(a.size() + b.size() + c.size());
  for (const at::TensorList list : {a, b, c}) kept.insert(kept.end(), list.begin(), list.end());
  fused_mul_add_(a, b, c);
}

}  // namespace

at::Tensor kron(const at::Tensor& A, const at::Tensor& B) {
  return call_operator<&detail::kron>("kron", A, B);
}

at::Tensor kron_matmul(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X) {
  return call_operator<&detail::kron_matmul>("kron_matmul", A, B, X);
}

at::Tensor kron_solve(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                      double damping) {
  return call_operator<&detail::kron_solve>("kron_solve", A, B, X, damping);
}

at::Tensor chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                          std::optional<int64_t> max_workspace_bytes,
                          const std::optional<std::string>& precision) {
  return call_operator<&detail::chunked_matmul>("chunked_matmul", A, B, max_workspace_bytes,
                                                precision);
}

at::Tensor spd_inverse(const at::Tensor& A, double damping) {
  return call_operator<&detail::spd_inverse>("spd_inverse", A, damping);
}

at::Tensor spd_solve(const at::Tensor& A, const at::Tensor& X, double damping) {
  return call_operator<&detail::spd_solve>("spd_solve", A, X, damping);
}

at::Tensor fused_mul_add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                         const std::optional<at::Tensor>& out) {
  if (out) {
    at::Tensor result = *out;
    call_operator<&detail::fused_mul_add_out>("fused_mul_add.out", a, b, c, result);
    return result;
  }
  return call_operator<&detail::fused_mul_add>("fused_mul_add", a, b, c);
}

void fused_mul_add_(at::TensorList a, at::TensorList b, at::TensorList c) {
  call_operator<&detail::fused_mul_add_>("fused_mul_add_", a, b, c);
}

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  ops::define_composite(m, "kron(Tensor A, Tensor B) -> Tensor", &detail::kron);
  ops::define_composite(m, "kron_matmul(Tensor A, Tensor B, Tensor X) -> Tensor",
                        &detail::kron_matmul);
  ops::define(m, "kron_solve(Tensor A, Tensor B, Tensor X, float damping) -> Tensor",
              &detail::kron_solve, &detail::kron_solve_meta,
              ops::refuse_gradients_kernel<kUseSolve>());
  ops::define(
      m,
      "chunked_matmul(Tensor A, Tensor B, *, int? max_workspace_bytes=None, str? precision=None) "
      "-> Tensor",
      &detail::chunked_matmul, &detail::chunked_matmul_meta, &chunked_matmul_autograd);
  ops::define(m, "spd_inverse(Tensor A, *, float damping=0.0) -> Tensor", &detail::spd_inverse,
              &detail::spd_inverse_meta, ops::refuse_gradients_kernel<kUseInverse>());
  ops::define(m, "spd_solve(Tensor A, Tensor X, *, float damping=0.0) -> Tensor",
              &detail::spd_solve, &detail::spd_solve_meta,
              ops::refuse_gradients_kernel<kUseSolve>());
  // ATen's operators, which they are made of, have shapes and dtypes for the device "meta".
  ops::define(m, "fused_mul_add(Tensor a, Tensor b, Tensor c) -> Tensor", &detail::fused_mul_add,
              nullptr, &fused_mul_add_autograd);
  ops::define(m, "fused_mul_add.out(Tensor a, Tensor b, Tensor c, *, Tensor(a!) out) -> ()",
              &detail::fused_mul_add_out, nullptr, &fused_mul_add_out_autograd);
  ops::define(m, "fused_mul_add_(Tensor[] a, Tensor[] b, Tensor(a!)[] c) -> ()",
              &detail::fused_mul_add_, nullptr, &fused_mul_add_lists_autograd);
  m.class_<TensorReferences>("TensorReferences").def(torch::init<>());
  ops::define_composite(m,
                        "fused_mul_add_.keeping(Tensor[] a, Tensor[] b, Tensor(a!)[] c, "
                        "__torch__.torch.classes.torchium.TensorReferences references) -> ()",
                        &fused_mul_add_lists_keeping);
}

}  // namespace torchium::linalg
