// d = mu d_prev + (F + Lambda)^-1 (v - F mu d_prev), F = J^T J / n and Lambda the dampings: the
// natural gradient with the momentum of SPRING (Goldshlager, Abrahamsen, Lin 2024, arXiv
// 2401.10190).
#pragma once

#include "optim/natural_gradient/conjugate_gradients.h"
#include "optim/natural_gradient/parameter_segments.h"
#include "optim/natural_gradient/parameter_vectors.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// Vectors, dampings, roundings and scales are those of segments.

// A gradient as v = c u + r, u = J^T 1 / n: its part along the mean of the captured gradients, and
// what clipping or weight decay has added to it.
struct GradientSplit {
  at::Tensor c;       // 0-dim float64
  ParameterVector r;  // empty: zero
};

// With r orthogonal to u. A part r within the `roundings` of v (gradient_rounding.h) counts as
// zero, because it would be divided by the damping.
GradientSplit split_gradient(const SegmentedJacobian& J, const ParameterVector& v,
                             const std::vector<double>& roundings);

// Solved in the space of samples. previous: mu d_prev. L: the Cholesky factor of
// J Lambda^-1 J^T / n + I.
ParameterVector gram_direction(const SegmentedJacobian& J, const std::vector<double>& dampings,
                               const GradientSplit& v, const ScaledVector& previous,
                               const at::Tensor& L);

// Solved in parameter space by conjugate gradients, to a relative residual of `eps`, or what the
// dtype of v allows.
ConjugateGradientsResult cg_direction(const SegmentedJacobian& J,
                                      const std::vector<double>& dampings, double eps,
                                      ParameterVector v, const ScaledVector& previous);

}  // namespace torchium::optim::detail
