// Natural gradient descent with the damped Fisher matrix of a batch, F = J^T J / n; solved in the
// space of the n rows of J, in that of the parameters, or by conjugate gradients.
#pragma once

#include "optim/natural_gradient/captured_batch.h"
#include "optim/natural_gradient/conjugate_gradients.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// Names and defaults are those of NaturalGradientOptions and of Python's torchium.NaturalGradient.
struct NaturalGradientHyperparameters {
  // One per parameter:
  std::vector<at::Tensor> lrs;  // 0-dim; float64 on the CPU, or on the parameters' device
  std::vector<double> dampings;
  std::vector<double> momentums;
  std::vector<bool> maximize;

  std::optional<double> max_norm;  // of the direction of all parameters together
  int64_t max_workspace_bytes = int64_t{1} << 28;
  bool adaptive_damping = false;
  int64_t nystrom_rank = 0;  // 0: no preconditioner
};

// Lists have one entry per parameter and are changed in place.
struct NaturalGradientState {
  std::vector<at::Tensor> steps;             // 0-dim float64
  std::vector<at::Tensor> momentum_buffers;  // state dtype; may be empty without momentum
  at::Tensor status;                         // step_status.h
};

// How a step solves its system.
struct Solver {
  std::string name;             // "gram", "explicit" or "cg"
  ConjugateGradientsRule rule;  // of "cg"
};

// `option`: a name, or "auto". eps: relative tolerance of conjugate gradients. rows: of J.
Solver chosen_solver(const std::string& option, double eps, int64_t max_workspace_bytes,
                     at::TensorList params, int64_t rows);

// One step of all parameters on one device. With v the gradients in `grads`:
//   d <- mu d_prev + (F + Lambda)^-1 (v - F mu d_prev)      (SPRING, arXiv 2401.10190)
//   d_prev <- d;  p <- p - lr d min(1, max_norm / |d|)      (+ for maximize)
// with Lambda the dampings. `factorization`: the Cholesky factor, float64, of
// J Lambda^-1 J^T / n + I [n, n] or of F + Lambda [P, P], NaN where that is not positive definite;
// or with nystrom_rank the factor of the preconditioner of conjugate gradients (nystrom.h). From an
// earlier step with the same batch and options; undefined: it is computed and left there.
// A direction that is not finite changes no parameter and counts as a failure in the status. Ranks
// that share the step (batch.shared) all call this, and have the same parameters after it.
// Returns float64 [4]: iterations and relative residual of conjugate gradients (else 0); with
// adaptive_damping v . d and the factor of max_norm.
at::Tensor natural_gradient_step(const NaturalGradientHyperparameters& hyperparameters,
                                 const Solver& solver, at::TensorList params, at::TensorList grads,
                                 NaturalGradientState& state, const CapturedBatch& batch,
                                 at::Tensor& factorization, const at::Tensor& found_inf);

}  // namespace torchium::optim::detail
