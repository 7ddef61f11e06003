#include "linalg/matrix_functions.h"

#include "linalg/eigh.h"
#include "linalg/newton.h"
#include "linalg/spectral.h"

#include <ATen/ATen.h>

#include <limits>

namespace torchium::linalg::detail {
namespace {

// |A X^p A - A|_F / |A|_F by matrix products, A = S + damping I; X = root is in the units of the
// caller. In float64: the small eigenvalues of A, which matter least here, have the largest images
// under X^p.
at::Tensor exact_residual(const Normalized& input, const at::Tensor& damping,
                          const at::Tensor& root, int64_t p) {
  at::Tensor A = input.matrix.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  A.diagonal(0, -2, -1).add_(damping.unsqueeze(-1));
  const at::Tensor X =
      root.to(at::kDouble) * input.scale.pow(-1.0 / static_cast<double>(p)).view({-1, 1, 1});
  const at::Tensor difference = at::matmul(A, at::matmul(at::matrix_power(X, p), A)).sub_(A);
  return difference.square_().sum({-2, -1}).sqrt_().div_(
      A.square_().sum({-2, -1}).sqrt_().clamp_min_(std::numeric_limits<double>::min()));
}

// The same for the images of one vector of random signs, at the cost of p + 2 products with it. The
// dtype of the input is enough: what X^p magnifies, the last product with A makes small again.
at::Tensor estimated_residual(const Normalized& input, const at::Tensor& damping,
                              const at::Tensor& root, int64_t p) {
  const auto column = [&](const at::Tensor& values) {
    return values.to(root.scalar_type()).view({-1, 1, 1});
  };
  const at::Tensor shift = column(damping);
  const at::Tensor unit = column(input.scale.pow(-1.0 / static_cast<double>(p)));
  const auto times_A = [&](const at::Tensor& v) {
    return at::matmul(input.matrix, v).add_(v * shift);
  };
  const at::Tensor target = times_A(random_signs(root.size(-1), root.options()));
  at::Tensor image = target;
  for (int64_t i = 0; i < p; ++i) {
    image = at::matmul(root, image * unit);
  }
  const at::Tensor difference = times_A(image).sub_(target);
  const at::Tensor norm = target.square().sum({-2, -1}).sqrt_();
  return difference.square_().sum({-2, -1}).sqrt_().div_(
      norm.clamp_min_(smallest_normal(root.scalar_type())));
}

at::Tensor relative_residual(const Normalized& input, const at::Tensor& damping,
                             const at::Tensor& root, int64_t p, Residual kind) {
  return kind == Residual::kEstimate ? estimated_residual(input, damping, root, p)
                                     : exact_residual(input, damping, root, p);
}

// A root in the units of the caller; damping and floor in those of Normalized.
struct SolverResult {
  at::Tensor root, damping, iterations, floor;
};

SolverResult root_by_eigh(const Normalized& input, int64_t p, double eps, double relative_eps) {
  const DampedSpectrum spectrum = damped_spectrum(input, eps, relative_eps);
  const at::Tensor f =
      (at::maximum(spectrum.values, spectrum.floor.unsqueeze(-1)) / input.scale.unsqueeze(-1))
          .pow_(-1.0 / static_cast<double>(p));
  return {compose(spectrum.vectors, f, /*non_negative=*/true), spectrum.damping,
          at::zeros({f.size(0)}, f.options().dtype(at::kLong)), spectrum.floor};
}

// A matrix whose residual is larger is answered by eigh.
constexpr double kNewtonResidualTolerance = 1e-2;

// The coupled iteration, and eigh for the matrices that it fails for: eigenvalues below its floor,
// negative ones above all.
SolverResult root_by_newton(const Normalized& input, int64_t p, double eps, double relative_eps) {
  NewtonRoot newton = newton_inverse_root(input, p, eps, relative_eps);
  SolverResult result{newton.root, newton.damping, newton.iterations, newton.floor};
  const at::Tensor residual =
      relative_residual(input, newton.damping, newton.root, p, Residual::kEstimate);
  const at::Tensor failed = residual.le(kNewtonResidualTolerance).logical_not_().nonzero().view(-1);
  if (failed.numel() > 0) {
    const Normalized rest{input.matrix.index_select(0, failed), input.scale.index_select(0, failed),
                          input.finite.index_select(0, failed)};
    const SolverResult solved = root_by_eigh(rest, p, eps, relative_eps);
    result.root.index_copy_(0, failed, solved.root);
    result.damping.index_copy_(0, failed, solved.damping);
    result.iterations.index_copy_(0, failed, solved.iterations);
    result.floor.index_copy_(0, failed, solved.floor);
  }
  return result;
}

// The faster method. On the CPU that is LAPACK, but for stacks of small matrices, where the
// iteration is ahead by a factor of two at most and where its floor is higher. cuSOLVER solves
// batches of orders up to 32 together and larger matrices one by one: on one H200 64 roots take 1.0
// ms against 2.5 at n = 32, 172 against 2.1 at n = 128; one takes 23 against 1.8 at n = 512.
bool prefers_newton(const at::Tensor& A) { return !A.is_cpu() && A.size(-1) > 32; }

}  // namespace

InverseRoot matrix_inverse_root(const at::Tensor& A, int64_t root, double eps, double relative_eps,
                                const std::string& method, Residual residual) {
  const at::IntArrayRef batch = A.sizes().slice(0, A.dim() - 2);
  const Normalized input = normalize_symmetric(as_stack(A), eps);
  const bool by_newton =
      A.numel() > 0 && (method == "newton" || (method == "auto" && prefers_newton(A)));
  const SolverResult solved = by_newton ? root_by_newton(input, root, eps, relative_eps)
                                        : root_by_eigh(input, root, eps, relative_eps);
  InverseRoot result{solved.root, at::Tensor(), solved.iterations.view(batch),
                     (solved.floor / input.scale).to(A.scalar_type())};
  if (residual != Residual::kNone) {
    result.residual =
        relative_residual(input, solved.damping, solved.root, root, residual).to(A.scalar_type());
    mark_non_finite(result.residual, input.finite);
    result.residual = result.residual.view(batch);
  }
  mark_non_finite(result.root, input.finite);
  mark_non_finite(result.floor, input.finite);
  result.root = result.root.view(A.sizes());
  result.floor = result.floor.view(batch);
  return result;
}

std::tuple<at::Tensor, at::Tensor> eigh(const at::Tensor& A) {
  const at::IntArrayRef batch = A.sizes().slice(0, A.dim() - 1);
  const Normalized input = normalize_symmetric(as_stack(A), 0.0);
  auto [values, vectors] = symmetric_eigensystem(input.matrix);
  const double limit = A.scalar_type() == at::kFloat ? std::numeric_limits<float>::max()
                                                     : std::numeric_limits<double>::max();
  values = (values.to(at::kDouble) / input.scale.unsqueeze(-1)).clamp_(-limit, limit);
  values = values.to(A.scalar_type());
  mark_non_finite(values, input.finite);
  mark_non_finite(vectors, input.finite);
  return {values.view(batch), vectors.view(A.sizes())};
}

}  // namespace torchium::linalg::detail
