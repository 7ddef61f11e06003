#include "optim/natural_gradient/nystrom.h"

#include "linalg/common/precision.h"
#include "linalg/spectral/eigh.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/util/irange.h>

#include <cmath>

namespace torchium::optim::detail {
namespace {

constexpr uint64_t kSeed = 20211005;  // any number: the same sketch in every run

// x times a power of the dampings, segment by segment.
ParameterVector scaled(const ParameterVector& x, const std::vector<double>& dampings,
                       double power) {
  ParameterVector result;
  for (const auto s : c10::irange(x.size())) {
    result.push_back(x[s] * std::pow(dampings[s], power));
  }
  return result;
}

at::Generator sketch_generator(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device).clone();
  generator.set_current_seed(kSeed);
  return generator;
}

// [P, rank] with orthonormal columns, by Cholesky QR: a Gaussian matrix is well conditioned.
at::Tensor random_basis(int64_t P, int64_t rank, const at::TensorOptions& options) {
  const at::Tensor gaussian =
      at::randn({P, rank}, sketch_generator(options.device()), options.dtype(at::kDouble));
  const at::Tensor L = std::get<0>(at::linalg_cholesky_ex(gaussian.mT().matmul(gaussian)));
  return at::linalg_solve_triangular(L.mT(), gaussian, /*upper=*/true, /*left=*/false).to(options);
}

}  // namespace

at::Tensor nystrom_factor(const SegmentedJacobian& J, const std::vector<double>& dampings,
                          const ParameterVector& like, int64_t rank) {
  const at::NoTF32Guard full_precision;
  at::ScalarType dtype = like[0].scalar_type();
  for (const at::Tensor& tensor : like) {
    dtype = at::promote_types(dtype, tensor.scalar_type());
  }
  const int64_t P = J.segments.elements();
  const auto n = static_cast<double>(J.samples());
  const auto options = like[0].options().dtype(dtype);
  const at::Tensor omega = random_basis(P, rank, options);
  at::Tensor Y = at::empty_like(omega);
  for (const auto k : c10::irange(rank)) {
    const ParameterVector x =
        scaled(J.segments.unflatten(omega.select(1, k).contiguous(), like), dampings, -0.5);
    const ParameterVector Fx = J.transpose_product(J.product(x).div_(n));
    Y.select(1, k).copy_(J.segments.flatten(scaled(Fx, dampings, -0.5), dtype));
  }
  // A shift by the rounding of Y makes the sketch positive definite.
  const at::Tensor shift =
      Y.norm().mul_(std::sqrt(static_cast<double>(P)) * linalg::detail::epsilon_of(dtype));
  Y.addcmul_(omega, shift);
  const at::Tensor core = omega.mT().matmul(Y).to(at::kDouble);
  const auto [C, info] = at::linalg_cholesky_ex((core + core.mT()).div_(2.0));
  const at::Tensor B = at::linalg_solve_triangular(C.mT(), Y.to(at::kDouble), /*upper=*/true,
                                                   /*left=*/false);
  // The singular values of B, squared, and its left singular vectors.
  const at::Tensor squares = B.mT().matmul(B);
  const at::Tensor largest = squares.diagonal().amax();
  const auto [values, V] = linalg::detail::symmetric_eigensystem(
      at::where(info == 0, squares / largest, at::eye(rank, squares.options())).unsqueeze(0));
  const at::Tensor roots = (values[0] * largest).clamp_min_(0).sqrt_();
  const at::Tensor s = (roots.square() - shift).clamp_min_(0);
  const at::Tensor weights = (1.0 - (s[0] + 1.0) / (s + 1.0)).sqrt_();
  const at::Tensor columns = at::where(roots > 0, weights / roots, 0.0);
  const at::Tensor W = B.matmul(V[0] * columns);
  return at::where(info == 0, W, 0.0).nan_to_num_(0.0, 0.0, 0.0).to(dtype);
}

ParameterVector preconditioned(const at::Tensor& W, const ParameterSegments& segments,
                               const std::vector<double>& dampings, const ParameterVector& x) {
  if (!W.defined()) {
    return scaled(x, dampings, -1.0);
  }
  const at::NoTF32Guard full_precision;
  const at::Tensor flat = segments.flatten(scaled(x, dampings, -0.5), W.scalar_type());
  const at::Tensor result = flat - at::mv(W, at::mv(W.t(), flat));
  return scaled(segments.unflatten(result, x), dampings, -0.5);
}

}  // namespace torchium::optim::detail
