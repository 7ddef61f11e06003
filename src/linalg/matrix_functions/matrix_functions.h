// Roots, powers and eigenvalues of batched symmetric matrices. Detail interface without argument
// checks and autograd; torchium/linalg.h is the public one.
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
  at::Tensor floor;       // [...]: smaller eigenvalues of A_d count as this value
};

// Larger roots always use eigenvalues: a residual takes p products with the root, which is then the
// identity up to a few rounding errors.
constexpr int64_t kLargestIteratedRoot = 256;

enum class Residual {
  kNone,      // only the root: residual, iterations and floor are undefined
  kEstimate,  // by a fixed random-sign probe: O(n^2) per matrix
  kExact,     // by matrix products
};

// (A + (eps + relative_eps s) I)^(-1/root), s the largest eigenvalue (eigh) or its bound (newton).
// A: [..., n, n] float32 or float64, symmetrised first. method: "auto", "eigh" or "newton".
InverseRoot matrix_inverse_root(const at::Tensor& A, int64_t root, double eps, double relative_eps,
                                const std::string& method, Residual residual);

struct MatrixPower {
  at::Tensor power;    // [..., n, n], exactly symmetric
  at::Tensor values;   // [..., n] float64: eigenvalues of the damped matrix
  at::Tensor vectors;  // [..., n, n]
};

// (A + (eps + relative_eps s) I)^exponent for a real exponent, s the largest eigenvalue. Integer
// exponents >= 0 are defined for indefinite matrices too. For others, negative eigenvalues count as
// zero; for negative exponents eigenvalues are floored as above.
MatrixPower matrix_power_with_eigensystem(const at::Tensor& A, double exponent, double eps,
                                          double relative_eps);

// The power alone.
at::Tensor matrix_power(const at::Tensor& A, double exponent, double eps, double relative_eps);

// Gradient of `power` with respect to A, symmetric, from the eigenvalues and eigenvectors: Q (K o
// Q^T G Q) Q^T with divided differences K (Daleckii-Krein; Higham 2008, Functions of Matrices,
// theorem 3.11). Eigenvalues below the floor have no gradient, unless the exponent is an integer >=
// 0.
at::Tensor matrix_power_backward(const at::Tensor& grad, const at::Tensor& values,
                                 const at::Tensor& vectors, double exponent, double relative_eps);

// Derivative of `power` in the direction `tangent` of A: Q (K o Q^T T Q) Q^T.
at::Tensor matrix_power_forward(const at::Tensor& tangent, const at::Tensor& values,
                                const at::Tensor& vectors, double exponent, double relative_eps);

// Eigenvalues [..., n] ascending, eigenvectors [..., n, n] in columns.
std::tuple<at::Tensor, at::Tensor> eigh(const at::Tensor& A);

}  // namespace torchium::linalg::detail
