#include "linalg/decompositions/device_spd_inverse.h"

#include "linalg/common/operand_checks.h"
#include "linalg/roots/device_newton.h"
#include "linalg/roots/newton.h"
#include "linalg/spectral/eigh.h"
#include "linalg/spectral/spectral.h"

#include <ATen/ATen.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/inverse_root/inverse_refinement.h"
#include "cuda_kernels/inverse_root/spd_inverse.h"
#include "linalg/products/batched_products.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {
namespace {

bool has_sweep(const at::Tensor& A) {
#ifdef TORCHIUM_WITH_CUDA
  return A.size(-1) <= cuda_kernels::kLargestSpdInverse;
#else
  return false;
#endif
}

struct Swept {
  at::Tensor inverse;      // [N, n, n]
  at::Tensor is_singular;  // [N]
};

// Of matrices [N, n, n].
Swept sweep(const at::Tensor& A, double damping) {
#ifdef TORCHIUM_WITH_CUDA
  torchium::detail::check_device_code(A.device());
  const c10::cuda::CUDAGuard device_guard(A.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor input = A.contiguous();
  const at::Tensor inverse = at::empty_like(input);
  const at::Tensor is_singular = at::empty({A.size(0)}, A.options().dtype(at::kBool));
  const int64_t n = A.size(-1);
  const double largest = 1 / newton_limits(n, at::kFloat).smallest_floor;
  C10_CUDA_CHECK(cuda_kernels::spd_inverse({.A = input.const_data_ptr<float>(),
                                            .inverse = inverse.mutable_data_ptr<float>(),
                                            .is_singular = is_singular.mutable_data_ptr<bool>(),
                                            .matrices = A.size(0),
                                            .n = static_cast<int>(n),
                                            .damping = damping,
                                            .noise = eigenvalue_noise(n, at::kFloat),
                                            .largest = largest},
                                           stream));
  const at::Tensor X = at::empty_like(input), residual = at::empty_like(input);
  device_inverse_where(input, damping, is_singular, X);
  C10_CUDA_CHECK(cuda_kernels::refine_inverse({.A = input.const_data_ptr<float>(),
                                               .X = X.const_data_ptr<float>(),
                                               .residual = residual.mutable_data_ptr<float>(),
                                               .inverse = inverse.mutable_data_ptr<float>(),
                                               .wanted = is_singular.const_data_ptr<bool>(),
                                               .matrices = A.size(0),
                                               .n = static_cast<int>(n),
                                               .damping = damping},
                                              stream));
  return {inverse, is_singular};
#else
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
#endif
}

// X + X (I - D X) of matrices [N, n, n], exactly symmetric. The correction is small: TF32 does.
at::Tensor refined(const at::Tensor& X, const at::Tensor& D) {
#ifdef TORCHIUM_WITH_CUDA
  at::Tensor rest = at::empty_like(X), half = X.clone();
  multiply_strided_out(rest, D, X, MatmulPrecision::kHighest, {.alpha = -1});
  rest.diagonal(0, -2, -1).add_(1);
  multiply_strided_out(half, X, rest, MatmulPrecision::kHigh, {.alpha = 0.5, .beta = 0.5});
  return half + half.mT();
#else
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
#endif
}

// Close to the end of the range a step of refinement may leave it.
at::Tensor finite_or(const at::Tensor& x, const at::Tensor& otherwise) {
  return at::where(at::isfinite(x), x, otherwise);
}

}  // namespace

bool has_device_spd_inverse(const at::Tensor& A) {
  return A.is_cuda() && compute_dtype(A) == at::kFloat &&
         has_device_root(as_batch(A).to(at::kFloat), /*p=*/1);
}

// Contiguous: `refined` takes the rows of damped().
DeviceSpdInverse::DeviceSpdInverse(const at::Tensor& A, double damping)
    : A_(A.contiguous()), damping_(damping) {
  const at::Tensor batch = as_batch(A_);
  if (has_sweep(A)) {
    const auto [inverse, is_singular] = sweep(batch, damping);
    inverse_ = inverse.view(A.sizes());
    is_singular_ = is_singular.view(A.sizes().slice(0, A.dim() - 2)).unsqueeze(-1).unsqueeze(-1);
  } else {
    inverse_ =
        device_inverse_root(batch, /*p=*/1, damping, /*relative_eps=*/0.0).root.view(A.sizes());
  }
}

at::Tensor DeviceSpdInverse::damped() const {
  const at::Tensor half = A_ * 0.5;
  at::Tensor sum = half + half.mT();
  sum.diagonal(0, -2, -1).add_(damping_);
  return sum;
}

at::Tensor DeviceSpdInverse::inverse() const {
  if (is_singular_.defined()) return inverse_;
  const at::Tensor batch = as_batch(inverse_);
  return finite_or(refined(batch, as_batch(damped())), batch).view(A_.sizes());
}

// Y + X (B - D Y) with Y = X B
at::Tensor DeviceSpdInverse::solution(const at::Tensor& B) const {
  const at::NoTF32Guard full_precision;
  const at::Tensor Y = at::matmul(inverse_, B);
  const at::Tensor refined = finite_or(Y + at::matmul(inverse_, B - at::matmul(damped(), Y)), Y);
  return is_singular_.defined() ? at::where(is_singular_, Y, refined) : refined;
}

}  // namespace torchium::linalg::detail
