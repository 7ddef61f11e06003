// Preconditioned conjugate gradients (Hestenes and Stiefel 1952) on lists of tensors.
#pragma once

#include "optim/natural_gradient/parameter_vectors.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace torchium::optim::detail {

struct ConjugateGradientsResult {
  ParameterVector x;
  at::Tensor iterations;         // until the tolerance was reached: 0-dim float64
  at::Tensor relative_residual;  // |b - A x| / |b| as the recurrence has it: 0-dim float64
};

struct ConjugateGradientsRule {
  double tolerance = 1e-8;  // of the relative residual
  int64_t max_iterations = 1000;
};

// x of A x = b for a symmetric positive definite A, from x = 0. `apply` is x -> A x and
// `precondition` x -> M^-1 x. All scalars are float64 and stay on the device. Once the tolerance is
// reached, x no longer changes: on the CPU the iteration ends; on a GPU, where the host cannot see
// the residual, all iterations up to max_iterations run, with steps of length zero. on_any_rank(b):
// whether b is true on any of the ranks that share A, which end the iteration together.
ConjugateGradientsResult conjugate_gradients(
    const std::function<ParameterVector(const ParameterVector&)>& apply,
    const std::function<ParameterVector(const ParameterVector&)>& precondition,
    const ParameterVector& b, const ConjugateGradientsRule& rule,
    const std::function<bool(bool)>& on_any_rank);

}  // namespace torchium::optim::detail
