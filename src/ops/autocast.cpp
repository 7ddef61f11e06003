// Under autocast every operator computes as without it: a root or a statistic in half precision
// would be wrong, and state must keep its dtype.

#include "support/no_autocast.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace torchium::ops {
namespace {

void call_without_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const torchium::detail::NoAutocast no_autocast;
  op.callBoxed(stack);
}

void register_operators(torch::Library& m) {
  for (const char* name : {"matrix_inverse_root",
                           "matrix_inverse_root.list",
                           "matrix_inverse_root_info",
                           "matrix_inverse_root_info.list",
                           "matrix_power",
                           "matrix_power.list",
                           "eigh",
                           "eigh.list",
                           "kron",
                           "kron_matmul",
                           "kron_matmul.list",
                           "kron_solve",
                           "kron_solve.list",
                           "chunked_matmul",
                           "spd_inverse",
                           "spd_solve",
                           "cholesky",
                           "spd_logdet",
                           "orthogonalize",
                           "polar",
                           "svd",
                           "fused_mul_add",
                           "fused_mul_add.out",
                           "fused_mul_add_",
                           "kronecker_factors_update_",
                           "kronecker_factors_add_lookups_",
                           "per_sample_gradients",
                           "per_sample_norms",
                           "per_sample_gram",
                           "per_sample_products",
                           "clipped_gradient_sums"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_without_autocast>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(torchium, AutocastCPU, m) { register_operators(m); }
TORCH_LIBRARY_IMPL(torchium, AutocastCUDA, m) { register_operators(m); }

}  // namespace torchium::ops
