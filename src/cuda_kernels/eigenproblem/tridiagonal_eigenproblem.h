// Eigenvalues and eigenvectors of symmetric tridiagonal matrices by divide and conquer.
#pragma once

#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// T is padded to an order that halves `levels` times into leaves of order `leaf`. The leaves are
// solved by QR steps, and pairs of neighbours merged level by level (Cuppen 1981): with
//   T = diag(T1, T2) + rho u u^T,  T1 = X1^T D1 X1,  T2 = X2^T D2 X2,
// the matrix diag(D1, D2) + rho z z^T, z = diag(X1, X2) u, has the eigenvalues of T, and its
// eigenvectors in the rows of S give those of T in the rows of S diag(X1, X2).
struct TridiagonalShape {
  int n;
  int leaf;  // at most kLargestLeaf
  int levels;

  __host__ __device__ int order() const { return leaf << levels; }
};

constexpr int kLargestLeaf = 16;
constexpr int kLargestTridiagonal = 1280;  // order()

// For n from 1 to kLargestTridiagonal.
TridiagonalShape tridiagonal_shape(int n);

struct TridiagonalMatrices {
  const double* diagonal;      // [count, n]
  const double* off_diagonal;  // [count, n]: the last one is not read
  TridiagonalShape shape;
  int count;
};

// The eigenvalues [count, order()], ascending within each leaf, and the eigenvectors
// [count, order() / leaf, leaf, leaf] in rows. Those of the padding come last in T.
cudaError_t solve_leaves(const TridiagonalMatrices& T, double* values, float* vectors,
                         cudaStream_t stream);

// A merge of blocks of order `size` / 2 to blocks of order `size`. All arrays but the vectors are
// of [count, order()] elements.
struct TridiagonalMerge {
  TridiagonalMatrices T;
  int size;
  double* values;        // of the blocks, ascending: those of the halves are replaced
  const float* vectors;  // of the halves, [count, order() / (size / 2), size / 2, size / 2]
  float* S;              // [count, order() / size, size, size]

  // Workspace. First in each block are those eigenvalues of the halves that the merge changes, the
  // poles, then those that it does not.
  int* poles_of_block;  // their number; [count, order() / size]
  int* source;          // their row in `vectors`
  double* pole;
  double* z;
  int* origin;              // of each new eigenvalue: the pole next to it,
  double* shift;            // and the difference from it
  int* rotations_of_block;  // [count, order() / size]
  int2* rotated;            // pairs of rows,
  double2* rotation;        // cosine and sine
};

cudaError_t merge_tridiagonal(const TridiagonalMerge& merge, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
