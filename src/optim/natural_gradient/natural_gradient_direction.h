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

// A gradient as v = J^T y / n + r.
struct GradientSplit {
  at::Tensor y;       // [n] float64; undefined: zero
  ParameterVector r;  // empty: zero
};

// y = c a, with c J^T a / n the projection of v: r is what clipping or weight decay has added to
// the gradient J^T a / n. A part r within the `roundings` of v (gradient_rounding.h) counts as
// zero, because it would be divided by the damping.
GradientSplit split_gradient(const SegmentedJacobian& J, const ParameterVector& v,
                             const at::Tensor& a, const std::vector<double>& roundings);

// Solved in the space of the rows of J. previous: mu d_prev. L: the Cholesky factor of
// J Lambda^-1 J^T / n + I.
ParameterVector gram_direction(const SegmentedJacobian& J, const std::vector<double>& dampings,
                               const GradientSplit& v, const ScaledVector& previous,
                               const at::Tensor& L);

// Solved in parameter space by conjugate gradients. W: nystrom_factor(), or undefined.
ConjugateGradientsResult cg_direction(const SegmentedJacobian& J,
                                      const std::vector<double>& dampings, const at::Tensor& W,
                                      const ConjugateGradientsRule& rule, ParameterVector v,
                                      const ScaledVector& previous);

// The relative residual `eps`, or what the state dtypes allow; as many iterations as F of J with
// these rows can need with rounding, but at most 1000.
ConjugateGradientsRule conjugate_gradients_rule(at::TensorList params, int64_t rows, double eps);

}  // namespace torchium::optim::detail
