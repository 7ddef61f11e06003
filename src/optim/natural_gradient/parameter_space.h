// Natural gradient in the space of the parameters, by the matrix F + Lambda [P, P] itself.
#pragma once

#include "optim/natural_gradient/natural_gradient_step.h"
#include "optim/natural_gradient/parameter_segments.h"
#include "optim/natural_gradient/parameter_vectors.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// The Cholesky factor of A [n, n] float64; NaN where A is not positive definite. Does not wait.
at::Tensor checked_cholesky(const at::Tensor& A);

// That of F + Lambda, float64 [P, P], for J with n rows on all ranks, of which a rank forms as many
// at a time as max_workspace_bytes hold, but at least those of one sample.
at::Tensor explicit_factor(at::TensorList params, const CapturedBatch& batch, int64_t n,
                           const NaturalGradientHyperparameters& hyperparameters);

// mu d_prev + (F + Lambda)^-1 (v - F mu d_prev) = (F + Lambda)^-1 (v + Lambda mu d_prev). Vectors
// and dampings are those of segments; previous: mu d_prev; L: explicit_factor().
ParameterVector explicit_direction(const ParameterSegments& segments,
                                   const std::vector<double>& dampings, const ParameterVector& v,
                                   const ScaledVector& previous, const at::Tensor& L);

}  // namespace torchium::optim::detail
