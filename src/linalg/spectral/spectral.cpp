#include "linalg/spectral/spectral.h"

#include "linalg/products/symmetric_update.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace torchium::linalg::detail {

at::Tensor as_batch(const at::Tensor& A) {
  return A.reshape(
      {c10::multiply_integers(A.sizes().slice(0, A.dim() - 2)), A.size(-2), A.size(-1)});
}

at::Tensor power_(at::Tensor x, double exponent) {
  if (!x.is_cpu() || !x.is_contiguous()) {
    return x.pow_(exponent);
  }
  constexpr int64_t kElementsPerTask = 512;
  auto* values = x.mutable_data_ptr<double>();
  at::parallel_for(0, x.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      values[i] = std::pow(values[i], exponent);
    }
  });
  return x;
}

double smallest_normal(at::ScalarType dtype) {
  return dtype == at::kFloat ? std::numeric_limits<float>::min()
                             : std::numeric_limits<double>::min();
}

at::Tensor random_signs(int64_t n, const at::TensorOptions& options) {
  constexpr int64_t kFactor = 0x5851F42D4C957F2D;
  at::Tensor hash = at::arange(1, n + 1, options.dtype(at::kLong)).mul_(kFactor);
  hash = hash.bitwise_xor_(hash.bitwise_right_shift(31)).mul_(kFactor);
  return hash.bitwise_right_shift(40).bitwise_and_(1).mul_(2).sub_(1).to(options).unsqueeze_(-1);
}

double saturation(at::ScalarType dtype) { return 1 / smallest_normal(dtype); }

at::Tensor spectral_floor(const at::Tensor& values, at::ScalarType dtype,
                          const at::Tensor& smallest) {
  if (values.size(-1) == 0) {
    return smallest.expand({values.size(0)});
  }
  const double noise = eigenvalue_noise(values.size(-1), dtype);
  return at::maximum(values.abs().amax(-1) * noise, smallest);
}

namespace {

// The same as below, row by row: for small batches on the CPU the overhead of tensor operations
// would exceed their arithmetic. Eigenvalues are ascending, or all NaN.
DampedSpectrum damp_on_host(const Eigensystem& system, const Normalized& input, double eps,
                            double relative_eps) {
  const at::ScalarType dtype = system.values.scalar_type();
  DampedSpectrum spectrum{system.values.to(at::kDouble), system.vectors,
                          at::empty_like(input.scale), at::empty_like(input.scale)};
  const int64_t n = system.values.size(-1);
  const double noise = eigenvalue_noise(n, dtype);
  const double* scale = input.scale.const_data_ptr<double>();
  double* damping = spectrum.damping.mutable_data_ptr<double>();
  double* floor = spectrum.floor.mutable_data_ptr<double>();
  for (int64_t i = 0; i < system.values.size(0); ++i) {
    double* values = spectrum.values.mutable_data_ptr<double>() + i * n;
    damping[i] = scale[i] * eps + relative_eps * std::max(values[n - 1], 0.0);
    for (int64_t j = 0; j < n; ++j) {
      values[j] += damping[i];
    }
    const double largest = std::max(std::abs(values[n - 1]), std::abs(values[0]));
    floor[i] = std::max(largest * noise, scale[i] * smallest_normal(dtype));
  }
  return spectrum;
}

}  // namespace

DampedSpectrum damped_spectrum(const Normalized& input, double eps, double relative_eps) {
  const Eigensystem system = symmetric_eigensystem(input.matrix);
  if (system.values.is_cpu() && system.values.numel() > 0) {
    return damp_on_host(system, input, eps, relative_eps);
  }
  at::Tensor values = system.values.to(at::kDouble);
  at::Tensor damping = input.scale * eps;
  if (values.size(-1) > 0) {
    damping = damping + relative_eps * values.amax(-1).clamp_min_(0);
  }
  values = values + damping.unsqueeze(-1);
  const at::ScalarType dtype = system.values.scalar_type();
  at::Tensor floor = spectral_floor(values, dtype, input.scale * smallest_normal(dtype));
  return {values, system.vectors, damping, floor};
}

at::Tensor spectral_residual(const at::Tensor& S, const Eigensystem& system) {
  const at::Tensor z = random_signs(S.size(-1), S.options());
  const at::Tensor image =
      at::matmul(system.vectors, system.values.unsqueeze(-1) * at::matmul(system.vectors.mT(), z));
  const at::Tensor difference = at::matmul(S, z).sub_(image).norm(2, {-2, -1});
  const at::Tensor largest = system.values.abs().amax(-1);
  return difference / (largest * z.norm()).clamp_min_(smallest_normal(S.scalar_type()));
}

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

at::Tensor is_finite(const at::Tensor& matrices) {
  if (matrices.numel() == 0) {
    return at::ones({matrices.size(0)}, matrices.options().dtype(at::kBool));
  }
  const auto [low, high] = matrices.flatten(1).aminmax(1);  // of NaN if there is one
  return low.isfinite().logical_and_(high.isfinite());
}

void mark_non_finite(at::Tensor values, const at::Tensor& finite) {
  if (finite.is_cpu()) {
    const bool* flags = finite.const_data_ptr<bool>();
    if (std::all_of(flags, flags + finite.numel(), [](bool flag) { return flag; })) {
      return;
    }
  }
  std::vector<int64_t> shape(values.dim(), 1);
  shape[0] = values.size(0);
  values.masked_fill_(finite.logical_not().view(shape), std::numeric_limits<double>::quiet_NaN());
}

}  // namespace torchium::linalg::detail
