#include "linalg/decompositions/polar_iteration.h"

#include "linalg/common/operand_checks.h"
#include "linalg/products/batched_products.h"
#include "linalg/roots/minimax.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <limits>
#include <utility>

#ifdef TORCHIUM_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>
#endif

namespace torchium::linalg::detail {

bool has_polar_iteration(const at::Tensor& A) {
#ifdef TORCHIUM_WITH_CUDA
  if (!A.is_cuda() || compute_dtype(A) != at::kFloat) return false;
  int ratio = 0;
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio, A.get_device()));
  return ratio <= 2;
#else
  return false;
#endif
}

namespace {

// |X| of each matrix, [N, 1, 1]; one for zero matrices.
at::Tensor frobenius_norms(const at::Tensor& X) {
  const at::Tensor norms = at::linalg_vector_norm(X, 2, at::IntArrayRef{-2, -1}, /*keepdim=*/true);
  return at::where(norms > 0, norms, at::ones_like(norms));
}

// out <- alpha A B + beta out. By cuBLAS itself on a device: these are up to 84 products, and
// torch's operators take longer to launch each than the device to compute it.
void multiply(at::Tensor& out, const at::Tensor& A, const at::Tensor& B, ProductScale scale = {}) {
#ifdef TORCHIUM_WITH_CUDA
  if (out.is_cuda()) {
    multiply_strided_out(out, A, B, MatmulPrecision::kHighest, scale);
    return;
  }
#endif
  out.baddbmm_(A, B, scale.beta, scale.alpha);
}

// The same for contiguous matrices of one shape.
void copy(at::Tensor& out, const at::Tensor& from) {
#ifdef TORCHIUM_WITH_CUDA
  if (out.is_cuda()) {
    C10_CUDA_CHECK(cudaMemcpyAsync(out.mutable_data_ptr(), from.const_data_ptr(), out.nbytes(),
                                   cudaMemcpyDeviceToDevice, c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  out.copy_(from);
}

}  // namespace

at::Tensor polar_iteration(const at::Tensor& X, double rcond) {
  const c10::DeviceGuard device_guard(X.device());
  constexpr double kRoundoff = std::numeric_limits<double>::epsilon() / 2;
  // |(Y^T Y)^2|_F^(1/4) is between the largest singular value of Y and n^(1/8) times that.
  const double lower = rcond * std::pow(static_cast<double>(X.size(-1)), -0.125);
  const auto steps = minimax_schedule(/*root=*/2, lower * lower, kRoundoff);

  at::Tensor G = at::bmm(X.mT(), X);
  at::Tensor S = at::bmm(G, G);
  const at::Tensor norm = frobenius_norms(S), root = norm.sqrt();
  at::Tensor Y = (X / root.sqrt()).contiguous();
  G.div_(root);
  S.div_(norm);
  at::Tensor W = at::empty_like(G), Y_of_step = at::empty_like(Y);
  for (size_t k = 0; k < steps->size(); ++k) {
    const auto [a, b, c] = (*steps)[k];
    if (k > 0) {
      multiply(G, Y.mT(), Y);
      copy(W, G);
      multiply(W, G, G, {.alpha = c, .beta = b});
    } else {
      at::add_out(W, b * G, S, c);
    }
    copy(Y_of_step, Y);
    multiply(Y_of_step, Y, W, {.alpha = 1, .beta = a});
    std::swap(Y, Y_of_step);
  }
  return Y;
}

}  // namespace torchium::linalg::detail
