// Trace, diagonal and log-determinant of large matrices that are known by their products, from
// products with random signs (Rademacher variables).
//
// The signs follow from `seed` by a counter-based generator and are equal on every device; no
// global random state is read or changed. Each product has `block_size` columns. Values are
// float64, except for diagonals, which have the operator's dtype. Without `tol` the host never
// waits. Many wide products of a large dense float32 matrix run on Hopper's tensor cores at
// float32's own error, if the workspace holds a copy of the matrix.
#pragma once

#include <torchium/export.h>
#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace torchium::linalg {

struct StochasticEstimate {
  at::Tensor value;           // [], or [n] for a diagonal
  at::Tensor standard_error;  // of the shape of `value`; NaN for a single sample
  int64_t products = 0;       // columns that A has been multiplied by
};

struct HutchinsonOptions {
  int64_t num_samples = 100;  // at most
  // Columns of a product; none: 10, or of a dense matrix 256, or 100 with tol.
  std::optional<int64_t> block_size;
  // Stops once |standard error| <= tol |value| (norms for a diagonal), which is tested after every
  // ten products, or each of a dense matrix without block_size: the host waits then.
  std::optional<double> tol;
  uint64_t seed = 0;
};

// tr A = E[z^T A z] (Hutchinson 1989).
TORCHIUM_API StochasticEstimate hutchinson_trace(const LinearOperator& A,
                                                 const HutchinsonOptions& options = {});

// diag A = E[z o A z] (Bekas, Kokiopoulou and Saad 2007).
TORCHIUM_API StochasticEstimate hutchinson_diagonal(const LinearOperator& A,
                                                    const HutchinsonOptions& options = {});

// tr A by Hutch++ (Meyer, Musco, Musco and Woodruff 2021): exact on the range Q of a third of the
// products, Hutchinson's estimate on its complement. num_products: at least 3.
TORCHIUM_API StochasticEstimate hutchpp(const LinearOperator& A, int64_t num_products = 99,
                                        uint64_t seed = 0);

// diag A of a symmetric A by XDiag (Epperly, Tropp and Webber 2024, "XTrace: making the most of
// every sample in stochastic trace estimation", section 2.4): every sample is used for the range,
// and for the complement of the range of the others. num_products: even, at least 4 (or 2 n, if
// that is less), at most 2 n; none: 100, or 2 n if that is less. From n on, it is exact.
TORCHIUM_API StochasticEstimate xdiag(const LinearOperator& A,
                                      std::optional<int64_t> num_products = std::nullopt,
                                      uint64_t seed = 0);

struct LogdetOptions {
  int64_t num_samples = 30;
  int64_t num_steps = 30;  // of Lanczos' method per sample, at most n
  int64_t block_size = 10;
  uint64_t seed = 0;
};

// log det A of a symmetric positive definite A by stochastic Lanczos quadrature (Ubaru, Chen and
// Saad 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature"). NaN if an
// eigenvalue of the small problems is not positive.
TORCHIUM_API StochasticEstimate logdet(const LinearOperator& A, const LogdetOptions& options = {});

}  // namespace torchium::linalg
