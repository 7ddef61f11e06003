// Square matrices that are known by their products and their structure.
//
// An operator is a cheap handle of an immutable matrix A, [..., n, n], float32 or float64. Every
// function uses the structure: the inverse of a Kronecker product is the Kronecker product of the
// inverses, and so on (Potapczynski, Finzi, Pleiss and Wilson 2023, "CoLA: Exploiting compositional
// structure for automatic and efficient numerical linear algebra"). Where there is none, matrices
// of order up to 1000 are formed and solved densely; larger ones by conjugate gradients, GMRES,
// Lanczos' or Arnoldi's method. structured_operators.h has the classes.
//
// Products with dense tensors are differentiable, as are functions that follow from the structure.
// Iterative methods raise an error if their operand, or the operator, requires grad. Every error is
// a c10::ValueError. Tests for singular matrices, and iterative methods, make the host wait for a
// GPU. Autocast has no effect, not even on products that are functions.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torchium::linalg {

namespace detail {
class OperatorNode;
}

// Of the iterative methods, which are used for matrices without structure of order above 1000.
struct IterationOptions {
  // Relative residual of solutions, and relative change of functions; default epsilon^(2/3).
  std::optional<double> tol;
  int64_t max_iterations = 1000;  // at most 200 for exp, sqrt and pow, which keep all vectors
};

// How traces, diagonals and determinants without structure are computed.
struct EstimateOptions {
  // Random samples: hutchpp for the trace, hutchinson_diagonal, stochastic Lanczos quadrature for
  // the log-determinant. Default: exactly, by n products or from the dense matrix.
  std::optional<int64_t> num_samples;
  uint64_t seed = 0;
};

class TORCHIUM_API LinearOperator {
 public:
  // [n, columns] -> [n, columns], of the operator's dtype and device.
  using Product = std::function<at::Tensor(const at::Tensor& X)>;

  // A [..., n, n] dense, or [n, n] sparse, float32 or float64: Dense or Sparse.
  LinearOperator(const at::Tensor& A);  // NOLINT(google-explicit-constructor)

  // `product` gives A X, `transpose_product` A^T X; without it, A^T X is the derivative of A X by
  // autograd. dtype: float32 (default) or float64.
  LinearOperator(int64_t n, Product product, const at::TensorOptions& options = {},
                 Product transpose_product = nullptr);

  int64_t size() const;                // n
  std::vector<int64_t> sizes() const;  // [..., n, n]
  const at::TensorOptions& options() const;
  std::string kind() const;  // the name of its class

  // A X for X [n] or [..., n, columns], of the operator's dtype and device.
  at::Tensor matmul(const at::Tensor& X) const;
  // X A for X [n] or [..., rows, n], by products with the transposed matrix. X @ A in Python.
  at::Tensor rmatmul(const at::Tensor& X) const;
  bool is_dense() const;  // of class Dense, no batch
  at::Tensor to_dense() const;
  LinearOperator transpose() const;

  // A with a property that it is known to have, which is not tested: "symmetric",
  // "positive_semidefinite" or "positive_definite". Cholesky, conjugate gradients, Lanczos' method
  // and eigh then replace LU, GMRES, Arnoldi's method and eig.
  LinearOperator assume(const std::string& property) const;
  bool is_symmetric() const;  // by its structure or by assume()

  // A^-1, as an operator. A singular matrix raises an error where the factorisation shows it.
  LinearOperator inverse(const IterationOptions& options = {}) const;
  // A^-1 X. Warns if an iterative method has not converged.
  at::Tensor solve(const at::Tensor& X, const IterationOptions& options = {}) const;
  LinearOperator exp(const IterationOptions& options = {}) const;
  // The principal root. Negative eigenvalues raise an error; rounding errors count as zero.
  LinearOperator sqrt(const IterationOptions& options = {}) const;
  // Integer exponents are defined for all matrices, negative ones for regular matrices, others as
  // for sqrt().
  LinearOperator pow(double exponent, const IterationOptions& options = {}) const;

  at::Tensor diag(const EstimateOptions& options = {}) const;   // [..., n]
  at::Tensor trace(const EstimateOptions& options = {}) const;  // [...]
  // sign and log |det A|, both [...]. An estimate needs a positive definite matrix.
  std::tuple<at::Tensor, at::Tensor> slogdet(const EstimateOptions& options = {}) const;
  // NaN for a negative determinant.
  at::Tensor logdet(const EstimateOptions& options = {}) const;
  at::Tensor det(const EstimateOptions& options = {}) const;

  // k eigenvalues [k] and eigenvectors [n, k] of norm 1 of a single matrix (default: all), the most
  // wanted first: `which` as for lanczos (symmetric, real results) and arnoldi (others, complex);
  // default "LM". Exact where structure or a dense matrix gives them.
  std::tuple<at::Tensor, at::Tensor> eigs(std::optional<int64_t> k = std::nullopt,
                                          const std::string& which = "LM") const;

  LinearOperator plus(const LinearOperator& B) const;  // of one order, dtype and device
  LinearOperator scaled(double c) const;               // c finite
  // In the class, so that they are no candidates for tensors.
  friend LinearOperator operator+(const LinearOperator& A, const LinearOperator& B) {
    return A.plus(B);
  }
  friend LinearOperator operator-(const LinearOperator& A, const LinearOperator& B) {
    return A.plus(B.scaled(-1.0));
  }
  friend LinearOperator operator*(double c, const LinearOperator& A) { return A.scaled(c); }
  friend LinearOperator operator*(const LinearOperator& A, double c) { return A.scaled(c); }
  friend LinearOperator operator/(const LinearOperator& A, double c) { return A.scaled(1.0 / c); }
  friend LinearOperator operator-(const LinearOperator& A) { return A.scaled(-1.0); }

  const detail::OperatorNode& node() const { return *node_; }
  explicit LinearOperator(std::shared_ptr<const detail::OperatorNode> node);

 private:
  std::shared_ptr<const detail::OperatorNode> node_;
};

}  // namespace torchium::linalg
