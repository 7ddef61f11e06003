// Inverse p-th roots of matrices too large for shared memory: everything but the products, which
// are in symmetric_product.h.
#pragma once

#include "cuda_kernels/inverse_root/inverse_root.h"
#include "cuda_kernels/inverse_root/root_schedule_table.h"
#include "cuda_kernels/split_gemm/split_matrices.h"

#include <cstddef>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// Workspace of one batch. All matrices share the last step: one with fewer quadratic steps than the
// longest schedule starts later.
struct LargeWorkspace {
  // Without memory, to compute `bytes`.
  LargeWorkspace(void* memory, int64_t matrices, int order);

  size_t bytes;
  struct SpectralBound* bounds;  // [matrices]: scale 0 if not finite
  struct NewtonPlan* plans;      // [matrices]
  double* images;                // [matrices, order]
  double* partials;              // [matrices, bands, 3]
  float* vectors;                // [3, matrices, order]
  float* largest;                // [matrices, order]: of the rows of the root
  float* squares;                // [matrices, product_sums(order)]: of S
  // [matrices]: the first quadratic step; schedules.steps if there is none, more if not finite.
  // Before start_inverse_root it is zero for all finite matrices.
  int* starts;
  int* first_start;  // [1]: the least of starts, after start_inverse_root
  float* units;      // [matrices]: factor of M at its first step

  // Coefficients of products (symmetric_product.h), [matrices, 4]: of q = a I + b M + c M^2 at step
  // k, and of M q^p, which compensates for the new unit of a matrix that starts:
  float* quadratic(int step) const { return row(step); }
  float* power(int step) const { return row(RootScheduleTable::kMaxSteps + step); }
  // Of Z (the last M q^p), V and q = I + W of the last step (root_schedule_table.h). V includes a
  // multiple of I, chosen so that W depends on V only through V^2.
  float* last_Z() const { return row(2 * RootScheduleTable::kMaxSteps); }
  float* last_V() const { return row(2 * RootScheduleTable::kMaxSteps + 1); }
  float* last_q() const { return row(2 * RootScheduleTable::kMaxSteps + 2); }

 private:
  float* row(int index) const { return coefficients_ + 4 * matrices_ * index; }

  int64_t matrices_;
  float* coefficients_;  // [2 kMaxSteps + 3, matrices, 4]
};

// The matrices of the iteration. Those of a step may reuse the memory of M and S, but Z needs its
// own.
struct LargeOperands {
  SplitMatrices M, S;  // the matrix in a first unit, and its square
  struct Step {
    SplitMatrices M, X;  // of matrices that start here: M, and X = q
  } steps[RootScheduleTable::kMaxSteps];
  SplitMatrices Z;  // of the last step; single fp16 parts
  SplitMatrices X;  // before the last step
};

// M = (A + damping I) / top, where top bounds the spectrum. Returns the launch error.
cudaError_t fill_inverse_root(const InverseRoot& arguments, const LargeWorkspace& workspace,
                              const SplitMatrices& M, cudaStream_t stream);

// From S = M^2 and its sums of squares: |S|_F^(1/2) is a tighter bound, close to the largest
// eigenvalue. Chooses the steps of every matrix and computes the product of the first one.
cudaError_t start_inverse_root(const InverseRoot& arguments, const RootScheduleTable& schedules,
                               const LargeWorkspace& workspace, const LargeOperands& operands,
                               cudaStream_t stream);

// Checks the roots X of M and writes all outputs except damping and floor.
cudaError_t finish_inverse_root(const InverseRoot& arguments, const LargeWorkspace& workspace,
                                const SplitMatrices& X, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
