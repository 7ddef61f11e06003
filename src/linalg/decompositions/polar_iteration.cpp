#include "linalg/decompositions/polar_iteration.h"

#include "linalg/common/operand_checks.h"
#include "linalg/roots/minimax.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#ifdef TORCHIUM_WITH_CUDA
#include <c10/cuda/CUDAException.h>

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

}  // namespace

at::Tensor polar_iteration(const at::Tensor& X, double rcond) {
  constexpr double kRoundoff = std::numeric_limits<double>::epsilon() / 2;
  // |(Y^T Y)^2|_F^(1/4) is between the largest singular value of Y and n^(1/8) times that.
  const double lower = rcond * std::pow(static_cast<double>(X.size(-1)), -0.125);
  const auto steps = minimax_schedule(/*root=*/2, lower * lower, kRoundoff);

  at::Tensor Y = X / frobenius_norms(X);
  at::Tensor G = at::bmm(Y.mT(), Y);
  at::Tensor S = at::bmm(G, G);
  const at::Tensor bound = frobenius_norms(S).pow(0.25);
  Y = Y / bound;
  G = G / bound.pow(2);
  S = S / bound.pow(4);
  for (size_t k = 0; k < steps->size(); ++k) {
    const auto [a, b, c] = (*steps)[k];
    if (k > 0) G = at::bmm(Y.mT(), Y);
    const at::Tensor W = k > 0 ? at::baddbmm(G, G, G, /*beta=*/b, /*alpha=*/c) : b * G + c * S;
    Y = at::baddbmm(Y, Y, W, /*beta=*/a);
  }
  return Y;
}

}  // namespace torchium::linalg::detail
