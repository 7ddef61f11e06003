// Functions of symmetric matrices by their eigenvalues, for roots and powers.
#pragma once

#include "linalg/products/symmetric_storage.h"
#include "linalg/spectral/eigh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// [..., n, n] -> [N, n, n], also for empty batches.
at::Tensor as_batch(const at::Tensor& A);

double smallest_normal(at::ScalarType dtype);

// Random signs [n, 1], the same for every call: a probe for residuals. A hash of the row, made on
// the device.
at::Tensor random_signs(int64_t n, const at::TensorOptions& options);

// Results saturate here, far enough below the largest number for the sums of a product.
double saturation(at::ScalarType dtype);

// S + (eps + relative_eps s) I by its eigenvalues, s = max(0, largest eigenvalue of S), in the
// units of Normalized.
struct DampedSpectrum {
  at::Tensor values;   // [N, n] float64, damped
  at::Tensor vectors;  // [N, n, n]
  at::Tensor damping;  // [N] float64
  at::Tensor floor;    // [N] float64: smaller values are rounding errors
};

DampedSpectrum damped_spectrum(const Normalized& input, double eps, double relative_eps);

// Largest rounding error among damped eigenvalues `values` [N, n]; at least `smallest` [N] or
// 0-dim.
at::Tensor spectral_floor(const at::Tensor& values, at::ScalarType dtype,
                          const at::Tensor& smallest);

// |S z - Q diag(values) Q^T z| / (|S| |z|) for each matrix of S [N, n, n], n > 0, and one vector z
// of random signs; NaN where the eigenvalues are.
at::Tensor spectral_residual(const at::Tensor& S, const Eigensystem& system);

// Q diag(f) Q^T for f [N, n] float64, exactly symmetric. f >= 0 halves the work.
at::Tensor compose(const at::Tensor& vectors, const at::Tensor& f, bool non_negative);

// x^exponent in place, for float64. On a CPU one number is rounded like any other: torch's vectors
// differ from its remainders, and a matrix would depend on its place in the batch.
at::Tensor power_(at::Tensor x, double exponent);

// Whether all entries are finite, [N] bool, for matrices [N, n, n].
at::Tensor is_finite(const at::Tensor& matrices);

// Fills values [N, ...] with NaN where `finite` [N] is false. On the CPU the common case is free.
void mark_non_finite(at::Tensor values, const at::Tensor& finite);

}  // namespace torchium::linalg::detail
