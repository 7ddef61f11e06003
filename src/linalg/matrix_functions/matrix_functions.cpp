#include "linalg/matrix_functions/matrix_functions.h"

#include "linalg/roots/device_newton.h"
#include "linalg/roots/newton.h"
#include "linalg/spectral/eigh.h"
#include "linalg/spectral/spectral.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

namespace torchium::linalg::detail {
namespace {

// |A X^p A - A|_F / |A|_F by matrix products, A = S + damping I; X = root is in the caller's units.
// In float64, because the small eigenvalues of A, which matter least here, have the largest images
// under X^p.
at::Tensor exact_residual(const Normalized& input, const at::Tensor& damping,
                          const at::Tensor& root, int64_t p) {
  at::Tensor A = input.matrix.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  A.diagonal(0, -2, -1).add_(damping.unsqueeze(-1));
  const at::Tensor X =
      root.to(at::kDouble) * input.scale.pow(-1.0 / static_cast<double>(p)).view({-1, 1, 1});
  // A on both sides: X^p alone would lose the digits of the large eigenvalues.
  const at::Tensor left = at::matmul(A, at::matrix_power(X, p - p / 2));
  const at::Tensor right = at::matmul(at::matrix_power(X, p / 2), A);
  const at::Tensor difference = at::matmul(left, right).sub_(A);
  return difference.square_().sum({-2, -1}).sqrt_().div_(
      A.square_().sum({-2, -1}).sqrt_().clamp_min_(std::numeric_limits<double>::min()));
}

// On the CPU a batched product with one column is several times slower than BLAS's matrix-vector
// product.
constexpr int64_t kSmallestVectorOrder = 64;

// [N, n, n] times [N, n, 1].
at::Tensor times_columns(const at::Tensor& matrices, const at::Tensor& columns) {
  if (!matrices.is_cpu() || matrices.size(-1) < kSmallestVectorOrder) {
    return at::bmm(matrices, columns);
  }
  at::Tensor images = at::empty(columns.sizes(), columns.options());
  for (int64_t i = 0; i < matrices.size(0); ++i) {
    at::Tensor image = images.select(0, i).select(-1, 0);
    at::mv_out(image, matrices.select(0, i), columns.select(0, i).select(-1, 0));
  }
  return images;
}

// The same by the image of one vector of random signs, with p + 2 products. The input's dtype
// suffices: what X^p magnifies, the last product with A reduces again. The norm of A is that of its
// entries: the image A v may be small by chance.
at::Tensor estimated_residual(const Normalized& input, const at::Tensor& damping,
                              const at::Tensor& root, int64_t p) {
  const auto column = [&](const at::Tensor& values) {
    return values.to(root.scalar_type()).view({-1, 1, 1});
  };
  const at::Tensor shift = column(damping);
  const at::Tensor unit = column(input.scale.pow(-1.0 / static_cast<double>(p)));
  const auto times_A = [&](const at::Tensor& v) {
    return times_columns(input.matrix, v).add_(v * shift);
  };
  const int64_t n = root.size(-1);
  const at::Tensor target = times_A(random_signs(n, root.options()).expand({root.size(0), n, 1}));
  at::Tensor image = target;
  for (int64_t i = 0; i < p; ++i) {
    image = times_columns(root, image * unit);
  }
  const at::Tensor difference = times_A(image).sub_(target);
  const at::Tensor norm = input.matrix.square().sum({-2, -1}).sqrt_().add_(
      shift.view({-1}), std::sqrt(static_cast<double>(n)));
  return difference.square_().sum({-2, -1}).sqrt_().div_(
      norm.clamp_min_(smallest_normal(root.scalar_type())));
}

at::Tensor relative_residual(const Normalized& input, const at::Tensor& damping,
                             const at::Tensor& root, int64_t p, Residual kind) {
  return kind == Residual::kEstimate ? estimated_residual(input, damping, root, p)
                                     : exact_residual(input, damping, root, p);
}

// A root in the caller's units; damping and floor in those of Normalized.
struct SolverResult {
  at::Tensor root, damping, floor;
  at::Tensor iterations = {};  // undefined: 0
  at::Tensor estimate = {};    // of the residual, if already known
};

SolverResult root_by_eigh(const Normalized& input, int64_t p, double eps, double relative_eps) {
  const DampedSpectrum spectrum = damped_spectrum(input, eps, relative_eps);
  const at::Tensor f = power_(
      at::maximum(spectrum.values, spectrum.floor.unsqueeze(-1)).div_(input.scale.unsqueeze(-1)),
      -1.0 / static_cast<double>(p));
  return {compose(spectrum.vectors, f, /*non_negative=*/true), spectrum.damping, spectrum.floor};
}

// Replaces failed roots by top^(-1/p) I, without a host synchronisation.
SolverResult replace_on_device(const NewtonRoot& newton, const Normalized& input,
                               const at::Tensor& residual, int64_t p) {
  const double exponent = -1.0 / static_cast<double>(p);
  const at::Tensor limit = (newton.floor / input.scale).pow_(exponent).mul_(kLargestNewtonRoot);
  const at::Tensor accepted = residual.le(kNewtonResidualTolerance)
                                  .logical_and_(newton.root.abs().amax({-2, -1}).le(limit));
  const at::Tensor identity = at::eye(newton.root.size(-1), newton.root.options());
  const at::Tensor scale = (newton.top / input.scale).pow_(exponent).to(newton.root.scalar_type());
  return {at::where(accepted.view({-1, 1, 1}), newton.root, identity * scale.view({-1, 1, 1})),
          newton.damping, newton.floor, newton.iterations * accepted};
}

// Where eigh can take over, it does so earlier.
constexpr double kResidualForEigh = 1e-2;

// Recomputes failed roots by eigh.
SolverResult replace_by_eigh(const NewtonRoot& newton, const Normalized& input,
                             const at::Tensor& residual, int64_t p, double eps,
                             double relative_eps) {
  SolverResult result{newton.root, newton.damping, newton.floor, newton.iterations, residual};
  const at::Tensor failed = residual.le(kResidualForEigh).logical_not_().nonzero().view(-1);
  if (failed.numel() > 0) {
    const Normalized rest{input.matrix.index_select(0, failed), input.scale.index_select(0, failed),
                          input.finite.index_select(0, failed)};
    const SolverResult solved = root_by_eigh(rest, p, eps, relative_eps);
    result.root.index_copy_(0, failed, solved.root);
    result.damping.index_copy_(0, failed, solved.damping);
    result.iterations.index_fill_(0, failed, 0);
    result.estimate.index_copy_(0, failed,
                                estimated_residual(rest, solved.damping, solved.root, p));
    result.floor.index_copy_(0, failed, solved.floor);
  }
  return result;
}

// The coupled iteration. Results that fail, mostly because of eigenvalues below minus the floor,
// are replaced.
SolverResult root_by_newton(const Normalized& input, int64_t p, double eps, double relative_eps) {
  const NewtonRoot newton = newton_inverse_root(input, p, eps, relative_eps);
  const at::Tensor residual =
      relative_residual(input, newton.damping, newton.root, p, Residual::kEstimate);
  return input.matrix.is_cpu() ? replace_by_eigh(newton, input, residual, p, eps, relative_eps)
                               : replace_on_device(newton, input, residual, p);
}

// In the caller's units, with NaN for matrices that are not finite.
InverseRoot finished(const Normalized& input, const SolverResult& solved, int64_t p,
                     Residual residual) {
  InverseRoot result{solved.root, {}, {}, {}};
  mark_non_finite(result.root, input.finite);
  if (residual == Residual::kNone) {
    return result;
  }
  const at::ScalarType dtype = solved.root.scalar_type();
  result.iterations = solved.iterations.defined()
                          ? solved.iterations
                          : at::zeros_like(solved.floor, solved.floor.options().dtype(at::kLong));
  result.residual =
      residual == Residual::kEstimate && solved.estimate.defined()
          ? solved.estimate
          : relative_residual(input, solved.damping, solved.root, p, residual).to(dtype);
  // A power of a root with rounding errors overflows for very large p.
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  result.residual = result.residual.nan_to_num(kInfinity, kInfinity);
  result.floor = (solved.floor / input.scale).to(dtype);
  mark_non_finite(result.residual, input.finite);
  mark_non_finite(result.floor, input.finite);
  return result;
}

// By torchium's kernels, which estimate the residual themselves.
InverseRoot root_by_kernels(const at::Tensor& A, int64_t p, double eps, double relative_eps,
                            Residual residual) {
  const DeviceRoot solved = device_inverse_root(A, p, eps, relative_eps);
  InverseRoot result{solved.root, solved.residual, solved.iterations,
                     solved.floor.to(A.scalar_type())};
  if (residual == Residual::kExact) {
    const Normalized input = normalize_symmetric(A, eps);
    result.residual =
        exact_residual(input, solved.damping * input.scale, solved.root, p).to(A.scalar_type());
  }
  return result;
}

// On the CPU the iteration beats LAPACK in float32 for small matrices (docs/roots.md), if every
// thread gets enough of them: the fixed cost of its many steps equals a few small eigenvalue
// problems, which LAPACK solves one per thread.
constexpr int64_t kMatricesPerThread = 3;
constexpr int64_t kElementsPerThread = 6144;

// MKL's products are slower on non-Intel processors.
bool has_fast_products() {
#ifdef __x86_64__
  return !at::hasMKL() || __builtin_cpu_is("intel");
#else
  return true;
#endif
}

// Up to this order the two are about equally fast: each squaring adds a product per step.
int64_t largest_newton_order(int64_t root) {
  if (root > 8) {
    return 0;
  }
  return !has_fast_products() ? 32 : root <= 4 ? 96 : 64;
}

// The faster method. On a CUDA device it is the iteration wherever it has kernels, by a factor of 4
// to 15. Without them, for example in float64, cuSOLVER is faster for small orders.
bool prefers_newton(const at::Tensor& A, int64_t root) {
  if (!A.is_cpu()) {
    return A.size(-1) > 32 || has_device_root(A, root);
  }
  const int64_t threads = at::get_num_threads();
  return A.scalar_type() == at::kFloat && A.size(-1) <= largest_newton_order(root) &&
         A.size(0) >= kMatricesPerThread * threads && A.numel() >= kElementsPerThread * threads;
}

}  // namespace

InverseRoot matrix_inverse_root(const at::Tensor& A, int64_t root, double eps, double relative_eps,
                                const std::string& method, Residual residual) {
  const at::IntArrayRef batch = A.sizes().slice(0, A.dim() - 2);
  const at::Tensor matrices = as_batch(A);
  const bool by_newton =
      A.numel() > 0 && root <= kLargestIteratedRoot &&
      (method == "newton" || (method == "auto" && prefers_newton(matrices, root)));
  InverseRoot result;
  if (by_newton && has_device_root(matrices, root)) {
    result = root_by_kernels(matrices, root, eps, relative_eps, residual);
  } else {
    const Normalized input = normalize_symmetric(matrices, eps);
    result = finished(input,
                      by_newton ? root_by_newton(input, root, eps, relative_eps)
                                : root_by_eigh(input, root, eps, relative_eps),
                      root, residual);
  }
  result.root = result.root.view(A.sizes());
  if (residual != Residual::kNone) {
    result.residual = result.residual.view(batch);
    result.iterations = result.iterations.view(batch);
    result.floor = result.floor.view(batch);
  }
  return result;
}

std::tuple<at::Tensor, at::Tensor> eigh(const at::Tensor& A) {
  const at::IntArrayRef batch = A.sizes().slice(0, A.dim() - 1);
  const Normalized input = normalize_symmetric(as_batch(A), 0.0);
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
