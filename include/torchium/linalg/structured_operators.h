// Matrices with structure: see linear_operator.h for what they can do.
//
// Tensors are float32 or float64 and are not copied: they must not change in place. Leading
// dimensions are batches of matrices. Wrong arguments raise a c10::ValueError.
#pragma once

#include <torchium/export.h>
#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torchium::linalg {

// A [..., n, n].
struct TORCHIUM_API Dense : LinearOperator {
  explicit Dense(const at::Tensor& A);
};

// diag(d): d [..., n].
struct TORCHIUM_API Diagonal : LinearOperator {
  explicit Diagonal(const at::Tensor& d);
};

// scale I of order n; finite. options: dtype and device, default float32 on the CPU.
struct TORCHIUM_API Identity : LinearOperator {
  explicit Identity(int64_t n, double scale = 1.0, const at::TensorOptions& options = {});
};

// The lower or upper triangle of A [..., n, n]; the other one is not read.
struct TORCHIUM_API Triangular : LinearOperator {
  explicit Triangular(const at::Tensor& A, bool lower = true);
};

// (P x)_i = x_perm[i]: perm [n] int64, every index once (tested). P^-1 = P^T.
struct TORCHIUM_API Permutation : LinearOperator {
  explicit Permutation(const at::Tensor& perm, const at::TensorOptions& options = {});
};

// Periodic convolution on a grid: (C x)_i = sum_j kernel_j x_(i - j mod shape), diagonal in Fourier
// space. x lists the grid's points in row-major order; n is the product of `shape`.
// kernel [..., k1, ..., kd] with ki <= shape[i] and index 0 at offset 0. Without a shape the grid
// is the kernel's own, and the kernel of a one-dimensional grid the first column of a circulant
// matrix.
struct TORCHIUM_API Convolution : LinearOperator {
  explicit Convolution(const at::Tensor& kernel,
                       const std::optional<std::vector<int64_t>>& shape = std::nullopt);
};

// A [n, n], COO or CSR.
struct TORCHIUM_API Sparse : LinearOperator {
  explicit Sparse(const at::Tensor& A);
};

// factors[0] factors[1] ...
struct TORCHIUM_API Product : LinearOperator {
  explicit Product(const std::vector<LinearOperator>& factors);
};

// terms[0] + terms[1] + ... Functions of A + c I follow from those of a symmetric A.
struct TORCHIUM_API Sum : LinearOperator {
  explicit Sum(const std::vector<LinearOperator>& terms);
};

// factors[0] (x) factors[1] (x) ...
struct TORCHIUM_API Kronecker : LinearOperator {
  explicit Kronecker(const std::vector<LinearOperator>& factors);
};

struct TORCHIUM_API BlockDiag : LinearOperator {
  explicit BlockDiag(const std::vector<LinearOperator>& blocks);
};

// diag(d) + U V^T: d [..., n], U and V [..., n, k]; V = U by default. Its inverse is of the same
// kind (Woodbury), its determinant one of order k (matrix determinant lemma), unless entries
// of d are zero, or so small next to U V^T that the formula would lose their digits
// (determinants of orders above 1000 keep it then).
struct TORCHIUM_API LowRankPlusDiagonal : LinearOperator {
  LowRankPlusDiagonal(const at::Tensor& d, const at::Tensor& U,
                      const std::optional<at::Tensor>& V = std::nullopt);
};

}  // namespace torchium::linalg
