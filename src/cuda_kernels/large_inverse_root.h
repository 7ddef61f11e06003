// Inverse p-th roots of matrices that do not fit into shared memory: all but the products, which
// are symmetric_product.h.
#pragma once

#include "cuda_kernels/inverse_root.h"
#include "cuda_kernels/split_matrices.h"

#include <cstddef>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

constexpr int kMostSteps = 16;

// Memory of one stack beside its matrices.
class LargeWorkspace {
 public:
  static size_t bytes(int64_t matrices, int n);
  LargeWorkspace(void* memory, int64_t matrices, int n);

  // Of step k: [matrices, 3] a, b, c of q.
  const float* coefficients(int step) const { return coefficients_ + 3 * matrices_ * step; }
  const int* steps() const { return steps_; }  // [matrices]

 private:
  friend struct LargeKernels;
  int64_t matrices_;
  struct NewtonPlan* plans_;  // [matrices]
  double* images_;            // [matrices, n]
  double* partials_;          // [matrices, bands, 3]
  float* vectors_;            // [3, matrices, n]
  float* coefficients_;       // [kMostSteps, matrices, 3]
  float* largest_;            // [matrices, n]: of the rows of the root
  int* steps_;
};

// Chooses the steps of every matrix and writes M = (A + damping I) / top in split form. The ladder
// has at most kMostSteps steps. Returns the error of the launches.
cudaError_t begin_inverse_root(const InverseRoot& arguments, const SmallLadder& ladder,
                               const LargeWorkspace& workspace, const SplitMatrices& M,
                               cudaStream_t stream);

// Where the root of M is for matrices that take k + 1 steps. From the second step on it is kept
// times rule.first.
struct RootOfSteps {
  SplitMatrices X[kMostSteps];
};

// Judges the roots and writes everything but damping and floor.
cudaError_t finish_inverse_root(const InverseRoot& arguments, const LargeWorkspace& workspace,
                                const RootOfSteps& roots, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
