// Linear systems with large matrices that are known by their products.
//
// Each column of B [n, m] is solved by itself, in units of its largest entry, all with the same
// products. A column with NaN or Inf yields NaN. The host waits once every ten iterations.
// Derivatives of the solution in reverse mode follow from another solve, with A^T. Wrong arguments
// raise a c10::ValueError. A warning counts the columns that have not converged.
#pragma once

#include <torchium/export.h>
#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace torchium::linalg {

struct SolveResult {
  at::Tensor solution;        // as B
  at::Tensor residual_norms;  // [m], or [] for B [n]: |b - A x|, float64
  at::Tensor converged;       // as residual_norms, bool
  int64_t iterations = 0;     // products with A, of m columns each
};

struct SolverOptions {
  std::optional<double> tol;  // |b - A x| <= tol |b|; default epsilon^(2/3)
  int64_t max_iterations = 1000;
  // P, close to A^-1; for cg symmetric positive definite.
  std::optional<LinearOperator> preconditioner;
};

// A^-1 B by conjugate gradients (Hestenes and Stiefel 1952) for a symmetric positive definite A.
// c10::ValueError: x^T A x <= 0 was met.
TORCHIUM_API SolveResult cg(const LinearOperator& A, const at::Tensor& B,
                            const SolverOptions& options = {});

// A^-1 B by GMRES (Saad and Schultz 1986), preconditioned from the right and restarted after
// `restart` iterations. Keeps restart + 1 vectors for each column.
TORCHIUM_API SolveResult gmres(const LinearOperator& A, const at::Tensor& B,
                               const SolverOptions& options = {}, int64_t restart = 50);

}  // namespace torchium::linalg
