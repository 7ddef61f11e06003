// Roots, powers and eigenvalues of symmetric matrices, batched over leading dimensions.
//
// A: [..., n, n] with n >= 0 and any leading dimensions, empty ones included; float32 or float64;
// float16 and bfloat16 are computed in float32. A matrix that is not symmetric is replaced by
// (A + A^T) / 2. Wrong arguments raise c10::ValueError; a matrix that holds NaN or Inf gives NaN
// for itself alone. Results are finite for every finite A: they saturate at the largest number.
//
// A list of stacks of mixed orders, dtypes and devices gives a list of results. Matrices of one
// order, dtype and device are solved together, so that nothing is launched for each matrix; their
// results are views of one stack.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace torchium::linalg {

struct InverseRootOptions {
  double eps = 0.0;             // finite, >= 0: damping
  double relative_eps = 0.0;    // finite, >= 0: damping in units of the largest eigenvalue
  std::string method = "auto";  // "auto", "eigh" or "newton"
};

struct InverseRootInfo {
  at::Tensor root;        // [..., n, n], the dtype of A
  at::Tensor residual;    // [...]: |D X^p D - D|_F / |D|_F with D the damped A and X the root
  at::Tensor iterations;  // [...] int64; 0 for "eigh"
  at::Tensor floor;       // [...]: eigenvalues of D below it are answered as if they were it
};

// (A + (eps + relative_eps s) I)^(-1/root) for positive semi-definite A and root >= 1, exactly
// symmetric.
//
// s is the largest eigenvalue ("eigh") or an upper bound of it, the smaller one of the Frobenius
// norm and the largest absolute row sum ("newton"). Eigenvalues of the damped matrix below a floor
// cannot be told from rounding errors and are answered as if they were the floor, which is not
// added to the others. With u = 2^-23 in float32 and 2^-52 in float64 the floor is
// (4 + sqrt(n) / 4) u times the largest eigenvalue for "eigh"; for "newton" it is the damping where
// that is above 16 u s (n up to 128) or 8 u s, and about 24 u s without damping. It is at least the
// smallest normal number (64 times it for "newton"), so that a zero matrix has a finite root. The
// answer of "newton" below its floor is right to a factor of 60 for root 1 (100 on a GPU), 10 for
// 2, 4.5 for 4, 2 for 8. "auto" takes the faster one. Roots above 256 are by "eigh" in any case.
//
// A matrix for which the iteration fails, because it has negative eigenvalues, is answered by
// "eigh" on the CPU. On a CUDA device nothing is read on the host: it is answered by a multiple of
// the identity there. Its `iterations` is 0. Not differentiable: use matrix_power.
TORCHIUM_API at::Tensor matrix_inverse_root(const at::Tensor& A, int64_t root,
                                            const InverseRootOptions& options = {});
TORCHIUM_API std::vector<at::Tensor> matrix_inverse_root(at::TensorList A, int64_t root,
                                                         const InverseRootOptions& options = {});

// The same with what is known about the result.
TORCHIUM_API InverseRootInfo matrix_inverse_root_info(const at::Tensor& A, int64_t root,
                                                      const InverseRootOptions& options = {});
TORCHIUM_API std::vector<InverseRootInfo> matrix_inverse_root_info(
    at::TensorList A, int64_t root, const InverseRootOptions& options = {});

// (A + (eps + relative_eps s) I)^exponent for any finite exponent, exactly symmetric; s is the
// largest eigenvalue.
//
// Integer exponents >= 0 hold for indefinite matrices too. For others A is taken to be positive
// semi-definite: negative eigenvalues count as zero for positive exponents, and eigenvalues below
// the floor of matrix_inverse_root as the floor for negative ones. Differentiable once, in reverse
// and in forward mode, also where eigenvalues coincide (Daleckii-Krein; Higham 2008, "Functions of
// Matrices", theorem 3.11).
TORCHIUM_API at::Tensor matrix_power(const at::Tensor& A, double exponent, double eps = 0.0,
                                     double relative_eps = 0.0);
TORCHIUM_API std::vector<at::Tensor> matrix_power(at::TensorList A, double exponent,
                                                  double eps = 0.0, double relative_eps = 0.0);

// Eigenvalues [..., n], ascending, and orthonormal eigenvectors [..., n, n] in columns. Not
// differentiable: use at::linalg_eigh.
TORCHIUM_API std::tuple<at::Tensor, at::Tensor> eigh(const at::Tensor& A);
TORCHIUM_API std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> eigh(at::TensorList A);

// Symmetric matrices of this process, the optimizers' included, for which LAPACK did not converge
// or was wrong, and which were solved again another way (docs/roots.md). CPU only.
TORCHIUM_API int64_t eigh_retries();

}  // namespace torchium::linalg
