// Roots, powers and eigenvalues of stacks of symmetric matrices. Detail interface: no checks of
// arguments and no autograd; torchium/linalg.h is the public one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace torchium::linalg::detail {

struct InverseRoot {
  at::Tensor root;        // [..., n, n], the dtype of the input, exactly symmetric
  at::Tensor residual;    // [...]: |A_d X^p A_d - A_d|_F / |A_d|_F, A_d the damped input
  at::Tensor iterations;  // [...] int64; 0 for eigh
  at::Tensor floor;       // [...]: eigenvalues of A_d below it are answered as if they were it
};

enum class Residual {
  kNone,      // `residual` is undefined
  kEstimate,  // by a fixed random-sign probe: O(n^2) a matrix
  kExact,     // by matrix products
};

// (A + (eps + relative_eps s) I)^(-1/root), s the largest eigenvalue (eigh) or its bound (newton).
// A: [..., n, n] float32 or float64, symmetrised first. method: "auto", "eigh" or "newton".
InverseRoot matrix_inverse_root(const at::Tensor& A, int64_t root, double eps, double relative_eps,
                                const std::string& method, Residual residual);

// (A + (eps + relative_eps s) I)^exponent for a real exponent. For negative exponents eigenvalues
// are floored as above.
at::Tensor matrix_power(const at::Tensor& A, double exponent, double eps, double relative_eps);

// Eigenvalues [..., n] ascending, eigenvectors [..., n, n] in columns.
std::tuple<at::Tensor, at::Tensor> eigh(const at::Tensor& A);

}  // namespace torchium::linalg::detail
