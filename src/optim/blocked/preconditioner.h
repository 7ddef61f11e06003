// The matrices of the blocks of Shampoo and full-matrix Adagrad: statistics, roots, directions.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/core/found_inf_guard.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// A root R = (L / c + (eps + relative_eps s) I)^exponent.
struct RootRule {
  double eps = 0.0;
  double relative_eps = 0.0;
  std::optional<double> exponent;  // none: -1/(2k), k the order of the block
  std::string method = "auto";
  int64_t exponent_warmup = 0;  // see root_exponent()
};

// The exponent -1/p of the roots of a block of order k that are renewed in step t. While
// t < exponent_warmup, p goes from 2k to that of the rule in whole numbers, at equal intervals of
// t: with few samples, small eigenvalues are mostly noise and would dominate the step.
double root_exponent(const RootRule& rule, int64_t order, int64_t t);

// A step later than every warm-up.
constexpr int64_t kLateStep = std::numeric_limits<int64_t>::max();

// On a GPU roots are accepted up to this residual (linalg/matrix_functions/matrix_functions.h). An
// accurate float32 root has about 1e-6, an iteration at its floor up to 0.07, and a failed one far
// more.
constexpr double kRootResidualTolerance = 0.25;

// Whether a parameter's roots are renewed at its step t (counted from 1): first at `start`, then at
// every multiple of update_freq, and four times between a power of two and the next (1 to 8, 10,
// 12, 14, 16, 20, ...) while these lie closer together.
bool root_is_due(int64_t t, int64_t start, int64_t update_freq);

// L_i <- beta2 L_i + (1 - beta2) mat_i(g) mat_i(g)^T for every mode i; beta2 = 1: a plain sum.
// `gradients`: [count, sizes...].
void update_statistics(MatrixBatch& batch, const at::Tensor& gradients, double beta2,
                       const FoundInfGuard& guard);

// Renews the roots of the entries whose parameter is due, from the statistics divided by its
// `corrections`. `due_steps`: the step t of each parameter that is due, 0 for the others. Matrices
// of one size and exponent are solved together, whatever their batch and mode. A root that is not
// finite or not accurate is rejected: the old one stays and its failures are counted.
void update_roots(std::vector<MatrixBatch>& batches, const RootRule& rule,
                  const std::vector<int64_t>& due_steps, const std::vector<StepScalar>& corrections,
                  const FoundInfGuard& guard);

// Whether kernels renew all roots of the batch, without a decision of the host.
bool renews_on_device(const MatrixBatch& batch, const RootRule& rule);

// g x_1 R_1 ... x_k R_k for blocks [count, sizes...].
at::Tensor precondition(const MatrixBatch& batch, const at::Tensor& gradients);

// Writes the largest count of consecutive failures, and its parameter, to `status`.
void record_root_failures(const std::vector<MatrixBatch>& batches, at::Tensor& status);

}  // namespace torchium::optim::detail
