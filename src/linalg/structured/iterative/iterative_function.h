// Functions of large matrices without structure, by iteration.
#pragma once

#include "linalg/structured/operator_node.h"

namespace torchium::linalg::detail {

void check_iteration(const char* function, const IterationOptions& options);

// Products by conjugate gradients if A is positive definite, else by GMRES.
LinearOperator make_iterative_inverse(const LinearOperator& A, const IterationOptions& options);

// f(A) x = |x| V f(H) e_1, with the basis V of Lanczos' (A symmetric) or Arnoldi's method from x
// and H = V^T A V (Saad 1992, "Analysis of some Krylov subspace approximations to the matrix
// exponential operator"). Each column has its own basis.
LinearOperator make_krylov_function(const LinearOperator& A, const MatrixFunction& f);

}  // namespace torchium::linalg::detail
