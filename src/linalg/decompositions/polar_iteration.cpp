#include "linalg/decompositions/polar_iteration.h"

#include "linalg/common/operand_checks.h"
#include "linalg/products/repeated_product.h"
#include "linalg/roots/minimax.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <limits>
#include <utility>

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

// |X| of each matrix, [N, 1, 1]; not zero.
at::Tensor frobenius_norms(const at::Tensor& X) {
  return at::linalg_vector_norm(X, 2, at::IntArrayRef{-2, -1}, /*keepdim=*/true)
      .clamp_min_(std::numeric_limits<double>::min());
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
  const RepeatedProduct gram(Y.mT(), Y), square(G, G), apply(Y, W);
  for (size_t k = 0; k < steps->size(); ++k) {
    const auto [a, b, c] = (*steps)[k];
    if (k > 0) {
      gram.run(G, Y.mT(), Y);
      square.run(W, G, G, c, b, G);
    } else {
      at::add_out(W, b * G, S, c);
    }
    apply.run(Y_of_step, Y, W, 1, a, Y);
    std::swap(Y, Y_of_step);
  }
  return Y;
}

}  // namespace torchium::linalg::detail
