// Natural gradient descent with the damped empirical Fisher matrix of a batch, F = J^T J / n, J the
// per-sample gradients; solved in the space of samples or by conjugate gradients.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// The layer calls of the last refresh.
struct CapturedBatch {
  std::vector<gradients::detail::LayerCall> calls;
  // Output gradients times scale / loss_scale are those of per-sample losses. For the mean loss of
  // n samples scale = n; loss_scale is the factor of a GradScaler.
  double scale = 1.0;
  at::Tensor loss_scale;  // one number on the device, or undefined
};

// Names and defaults are those of NaturalGradientOptions and of Python's torchium.NaturalGradient.
struct NaturalGradientHyperparameters {
  // One per parameter:
  std::vector<at::Tensor> lrs;  // 0-dim; float64 on the CPU, or on the parameters' device
  std::vector<double> dampings;
  std::vector<double> momentums;
  std::vector<bool> maximize;

  double eps = 1e-8;               // relative tolerance of conjugate gradients
  std::optional<double> max_norm;  // of the direction of all parameters together
  std::string solver = "auto";     // "auto", "gram" or "cg"
};

// Lists have one entry per parameter and are changed in place.
struct NaturalGradientState {
  std::vector<at::Tensor> steps;             // 0-dim float64
  std::vector<at::Tensor> momentum_buffers;  // state dtype; may be empty without momentum
  at::Tensor status;                         // step_status.h
};

// One step of all parameters on one device. With v the gradients in `grads`:
//   d <- mu d_prev + (F + Lambda)^-1 (v - F mu d_prev)      (SPRING, arXiv 2401.10190)
//   d_prev <- d;  p <- p - lr d min(1, max_norm / |d|)      (+ for maximize)
// `factorization`: the Cholesky factor L [n, n] float64 of S = J Lambda^-1 J^T / n + I, Lambda the
// dampings; NaN where S is not positive definite. From an earlier step with the same calls and
// dampings; undefined: it is computed and left there, unless conjugate gradients solve (`solver`
// "cg", or "auto" with more samples than elements of parameters, or more than 4096).
// `refreshed`: the batch is the one that `grads` come from.
// A direction that is not finite changes no parameter and counts as a failure in the status.
// Returns float64 [3]: iterations, relative residual (of conjugate gradients, else 0), 1 if
// conjugate gradients were used.
at::Tensor natural_gradient_step(const NaturalGradientHyperparameters& hyperparameters,
                                 at::TensorList params, at::TensorList grads,
                                 NaturalGradientState& state, const CapturedBatch& batch,
                                 at::Tensor& factorization, bool refreshed,
                                 const at::Tensor& found_inf);

}  // namespace torchium::optim::detail
