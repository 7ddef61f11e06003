// The randomized Nystrom preconditioner of conjugate gradients (Frangella, Tropp, Udell 2021, arXiv
// 2110.02820, algorithm 2.1 and equation 1.3).
#pragma once

#include "optim/natural_gradient/parameter_segments.h"
#include "optim/natural_gradient/parameter_vectors.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// W [P, rank] with I - W W^T the preconditioner of A + I for A = Lambda^-1/2 F Lambda^-1/2:
//   A ~ U diag(s) U^T from a sketch A Omega,  W = U diag(1 - (s_rank + 1) / (s + 1))^1/2.
// Omega is the same in each call. Costs `rank` products with F. Zero where the sketch is not
// positive definite. Does not wait for the device. rank: at least 1, at most P and the rows of J.
// like: a vector in segments.
at::Tensor nystrom_factor(const SegmentedJacobian& J, const std::vector<double>& dampings,
                          const ParameterVector& like, int64_t rank);

// Lambda^-1/2 (I - W W^T) Lambda^-1/2 x; W undefined: Lambda^-1 x.
ParameterVector preconditioned(const at::Tensor& W, const ParameterSegments& segments,
                               const std::vector<double>& dampings, const ParameterVector& x);

}  // namespace torchium::optim::detail
