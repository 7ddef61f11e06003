// Eigenvalues by Jacobi's method: slow, but it converges for every symmetric matrix.
#pragma once

#include <cstdint>

namespace torchium::linalg::detail {

// A: [n, n], symmetric, finite and scaled so that squares of its entries are finite; on return its
// diagonal holds the eigenvalues, unsorted. V: [n, n]; row k becomes the eigenvector of the k-th.
// Cyclic by rows (Golub and Van Loan, Matrix Computations, 8.5). The number of sweeps is bounded.
// After any number of them the result is finite and V is orthogonal.
void jacobi_eigensystem(double* A, double* V, int64_t n);

}  // namespace torchium::linalg::detail
