// Roots, powers and eigenvalues of symmetric matrices, batched over leading dimensions.
//
// A: [..., n, n] with n >= 0 and any leading dimensions, also empty; float32 or float64; float16
// and bfloat16 are computed in float32. A is replaced by (A + A^T) / 2 if not symmetric. Wrong
// arguments raise c10::ValueError. A matrix with NaN or Inf yields NaN and does not affect the
// others. Results for finite A are finite: they saturate.
//
// A list of batches of mixed orders, dtypes and devices gives a list of results. Matrices of equal
// order, dtype and device are solved together, without a launch per matrix; their results are views
// of one buffer.
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
  at::Tensor floor;       // [...]: smaller eigenvalues of D count as this value
};

// (A + (eps + relative_eps s) I)^(-1/root) for positive semi-definite A and root >= 1, exactly
// symmetric.
//
// s is the largest eigenvalue for "eigh", and an upper bound of it for "newton": the smaller of
// the Frobenius norm and the largest absolute row sum. "auto" selects the faster method. Roots
// above 256 always use "eigh".
//
// Floor: smaller eigenvalues of the damped matrix, hidden by rounding errors, count as the floor,
// which is not added to the others. With u = 2^-23 in float32 and 2^-52 in float64 it is
// (4 + sqrt(n) / 4) u times the largest eigenvalue for "eigh". For "newton" it is the damping if
// that exceeds 16 u s (n up to 128) or 8 u s, and about 24 u s without damping. It is at least the
// smallest normal number (64 times that for "newton"), so a zero matrix has a finite root. Below
// its floor, "newton" is accurate to a factor of 60 for root 1 (100 on a GPU), 10 for 2, 4.5 for 4,
// 2 for 8.
//
// If the iteration fails, because of negative eigenvalues, `iterations` is 0. A CPU then uses
// "eigh". A CUDA device, whose results the host does not read, returns a multiple of the identity.
// Not differentiable: use matrix_power.
TORCHIUM_API at::Tensor matrix_inverse_root(const at::Tensor& A, int64_t root,
                                            const InverseRootOptions& options = {});
TORCHIUM_API std::vector<at::Tensor> matrix_inverse_root(at::TensorList A, int64_t root,
                                                         const InverseRootOptions& options = {});

// The same, with residual, iterations and floor.
TORCHIUM_API InverseRootInfo matrix_inverse_root_info(const at::Tensor& A, int64_t root,
                                                      const InverseRootOptions& options = {});
TORCHIUM_API std::vector<InverseRootInfo> matrix_inverse_root_info(
    at::TensorList A, int64_t root, const InverseRootOptions& options = {});

// (A + (eps + relative_eps s) I)^exponent for any finite exponent, exactly symmetric; s is the
// largest eigenvalue.
//
// Integer exponents >= 0 are defined for indefinite matrices too. For other exponents A is assumed
// positive semi-definite: with positive exponents, negative eigenvalues count as zero; with
// negative exponents, eigenvalues below the floor of matrix_inverse_root count as that floor.
// Without relative_eps and where no derivative is recorded, integers up to 16 are products, and on
// a CUDA device -1/p, -2/p and 1/2 are made of one matrix_inverse_root by "newton", with its floor.
// All others take eigenvalues.
//
// Differentiable once, in reverse and forward mode, also if eigenvalues coincide (Daleckii-Krein;
// Higham 2008, "Functions of Matrices", theorem 3.11).
TORCHIUM_API at::Tensor matrix_power(const at::Tensor& A, double exponent, double eps = 0.0,
                                     double relative_eps = 0.0);
TORCHIUM_API std::vector<at::Tensor> matrix_power(at::TensorList A, double exponent,
                                                  double eps = 0.0, double relative_eps = 0.0);

// Eigenvalues [..., n], ascending, and orthonormal eigenvectors [..., n, n] in columns. Not
// differentiable: use at::linalg_eigh.
TORCHIUM_API std::tuple<at::Tensor, at::Tensor> eigh(const at::Tensor& A);
TORCHIUM_API std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> eigh(at::TensorList A);

// The number of symmetric matrices in this process, including those of the optimizers, that were
// solved again because LAPACK did not converge or was wrong (docs/roots.md). CPU only.
TORCHIUM_API int64_t eigh_retries();

}  // namespace torchium::linalg
