#include "linalg/matrix_functions.h"

#include "linalg/eigh.h"
#include "linalg/newton.h"
#include "linalg/symmetric_storage.h"
#include "linalg/symmetric_update.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// [..., n, n] -> [N, n, n], also for empty stacks.
at::Tensor as_stack(const at::Tensor& A) {
  return A.dim() == 3 ? A
                      : A.reshape({c10::multiply_integers(A.sizes().slice(0, A.dim() - 2)),
                                   A.size(-2), A.size(-1)});
}

double smallest_normal(at::ScalarType dtype) {
  return dtype == at::kFloat ? std::numeric_limits<float>::min()
                             : std::numeric_limits<double>::min();
}

// Powers saturate here, far enough below the largest number for the sums of a product.
double saturation(at::ScalarType dtype) { return 1 / smallest_normal(dtype); }

// The damped eigenvalues in the units of Normalized.
struct Spectrum {
  at::Tensor values;   // [N, n] float64
  at::Tensor damping;  // [N] float64
  at::Tensor floor;    // [N] float64: smaller values are rounding errors
};

Spectrum damped_spectrum(const at::Tensor& eigenvalues, const Normalized& input, double eps,
                         double relative_eps) {
  const at::ScalarType dtype = eigenvalues.scalar_type();
  const int64_t n = eigenvalues.size(-1);
  const at::Tensor values = eigenvalues.to(at::kDouble);
  const at::Tensor damping = input.scale * eps + relative_eps * values.amax(-1).clamp_min_(0);
  const at::Tensor damped = values + damping.unsqueeze(-1);
  const at::Tensor noise = damped.abs().amax(-1).mul_(eigenvalue_noise(n, dtype));
  return {damped, damping, at::maximum(noise, input.scale * smallest_normal(dtype))};
}

// Q diag(f) Q^T for f [N, n] float64. With f >= 0 half the work of a product suffices.
at::Tensor compose(const at::Tensor& vectors, const at::Tensor& f, bool non_negative) {
  at::Tensor result = at::empty(vectors.sizes(), vectors.options());
  if (non_negative) {
    symmetric_update_(result, vectors * f.sqrt().to(vectors.scalar_type()).unsqueeze(-2), 0.0, 1.0);
  } else {
    symmetric_product_out(result, vectors * f.to(vectors.scalar_type()).unsqueeze(-2),
                          vectors.mT());
  }
  return result;
}

// Random signs [n, 1], the same for every call.
at::Tensor probe(int64_t n, const at::TensorOptions& options) {
  at::Tensor signs = at::empty({n, 1}, at::kDouble);
  double* data = signs.mutable_data_ptr<double>();
  uint64_t state = 0x9E3779B97F4A7C15u;  // splitmix64
  for (int64_t i = 0; i < n; ++i) {
    uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    data[i] = (z ^ (z >> 31)) & 1 ? 1.0 : -1.0;
  }
  return signs.to(options);
}

// |A X^p A - A|_F / |A|_F, A = S + damping I; X = root is in the units of the caller. For kEstimate
// the norms are those of the products with one vector of random signs. In float64, because the
// small eigenvalues of A, which matter least here, have the largest images under X^p.
at::Tensor relative_residual(const Normalized& input, const at::Tensor& damping,
                             const at::Tensor& root, int64_t p, Residual kind) {
  at::Tensor A = input.matrix.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  A.diagonal(0, -2, -1).add_(damping.unsqueeze(-1));
  const at::Tensor X =
      root.to(at::kDouble) * input.scale.pow(-1.0 / static_cast<double>(p)).view({-1, 1, 1});
  at::Tensor target = A;
  at::Tensor image;
  if (kind == Residual::kEstimate) {
    target = at::matmul(A, probe(A.size(-1), A.options()));
    image = target;
    for (int64_t i = 0; i < p; ++i) {
      image = at::matmul(X, image);
    }
  } else {
    image = at::matmul(at::matrix_power(X, p), A);
  }
  image = at::matmul(A, image).sub_(target);
  const at::Tensor norm = target.square().sum({-2, -1}).sqrt_();
  return image.square_().sum({-2, -1}).sqrt_().div_(
      norm.clamp_min_(std::numeric_limits<double>::min()));
}

// A root in the units of the caller; damping and floor in those of Normalized.
struct SolverResult {
  at::Tensor root, damping, iterations, floor;
};

SolverResult root_by_eigh(const Normalized& input, int64_t p, double eps, double relative_eps) {
  const double exponent = -1.0 / static_cast<double>(p);
  const auto [values, vectors] = symmetric_eigensystem(input.matrix);
  const Spectrum spectrum = damped_spectrum(values, input, eps, relative_eps);
  const at::Tensor f =
      (at::maximum(spectrum.values, spectrum.floor.unsqueeze(-1)) / input.scale.unsqueeze(-1))
          .pow_(exponent);
  return {compose(vectors, f, /*non_negative=*/true), spectrum.damping,
          at::zeros({values.size(0)}, values.options().dtype(at::kLong)), spectrum.floor};
}

SolverResult root_by_newton(const Normalized& input, int64_t p, double eps, double relative_eps) {
  NewtonRoot newton = newton_inverse_root(input, p, eps, relative_eps);
  return {newton.root, newton.damping, newton.iterations, newton.floor};
}

// NaN for the matrices that are not finite. On the CPU the common case costs no pass.
void mark_non_finite(at::Tensor values, const at::Tensor& finite) {
  if (finite.is_cpu() && finite.all().item<bool>()) {
    return;
  }
  std::vector<int64_t> shape(values.dim(), 1);
  shape[0] = -1;
  values.masked_fill_(finite.logical_not().view(shape), std::numeric_limits<double>::quiet_NaN());
}

at::Tensor integer_power_or_clamped(const at::Tensor& values, double exponent) {
  return std::floor(exponent) == exponent ? values.pow(exponent)
                                          : values.clamp_min(0).pow_(exponent);
}

}  // namespace

InverseRoot matrix_inverse_root(const at::Tensor& A, int64_t root, double eps, double relative_eps,
                                const std::string& method, Residual residual) {
  const at::IntArrayRef batch = A.sizes().slice(0, A.dim() - 2);
  const Normalized input = normalize_symmetric(as_stack(A), eps);
  const SolverResult solved = method == "newton" ? root_by_newton(input, root, eps, relative_eps)
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

at::Tensor matrix_power(const at::Tensor& A, double exponent, double eps, double relative_eps) {
  const Normalized input = normalize_symmetric(as_stack(A), eps);
  const auto [values, vectors] = symmetric_eigensystem(input.matrix);
  const Spectrum spectrum = damped_spectrum(values, input, eps, relative_eps);
  const at::Tensor base =
      exponent < 0 ? at::maximum(spectrum.values, spectrum.floor.unsqueeze(-1)) : spectrum.values;
  const double limit = saturation(A.scalar_type());
  const at::Tensor f =
      integer_power_or_clamped(base / input.scale.unsqueeze(-1), exponent).clamp_(-limit, limit);
  const bool may_be_negative = exponent > 0 && std::fmod(exponent, 2.0) == 1.0;
  at::Tensor result = compose(vectors, f, /*non_negative=*/!may_be_negative);
  mark_non_finite(result, input.finite);
  return result.view(A.sizes());
}

std::tuple<at::Tensor, at::Tensor> eigh(const at::Tensor& A) {
  const at::IntArrayRef batch = A.sizes().slice(0, A.dim() - 1);
  const Normalized input = normalize_symmetric(as_stack(A), 0.0);
  auto [values, vectors] = symmetric_eigensystem(input.matrix);
  values = (values.to(at::kDouble) / input.scale.unsqueeze(-1)).to(A.scalar_type());
  mark_non_finite(values, input.finite);
  mark_non_finite(vectors, input.finite);
  return {values.view(batch), vectors.view(A.sizes())};
}

}  // namespace torchium::linalg::detail
