// What comes before and after the inversion of the factors of K-FAC on a GPU, for all layers at
// once. Symbols as in optim/kfac/factors/kfac_inverses.cpp.
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// The factors of a layer, of which each group is one tile.
struct DampingEntry {
  const float *A, *G;             // [groups, n, n], or their diagonals [groups, n]
  double *A_damping, *G_damping;  // [groups]
  double root_damping;            // sqrt(damping)
  double floor;
  int A_order, G_order;  // n
  bool A_is_diagonal, G_is_diagonal;
  int first_tile;
};

// pi sqrt(damping) of A and sqrt(damping) / pi of G, at least the floor, with pi^2 the ratio of the
// mean eigenvalues of A and G; without uses_pi, pi = 1.
cudaError_t damp_factors(const Table<DampingEntry>& layers, bool uses_pi, cudaStream_t stream);

// One factor of a layer.
struct InverseEntry {
  float* root;  // [groups, n, n], or [groups, n]
  const float* new_root;
  float* eigenvalues;  // [groups, n]; null: none
  const double* new_eigenvalues;
  const bool *accepted, *other;  // [groups]: of this factor, and of the other one of the layer
  int* failures;
  double floor;      // of the eigenvalues
  int64_t elements;  // of the root of one group
  int groups, order;
  int first_tile;
};
constexpr int kInverseTile = 1 << 13;  // elements

// Takes the roots and eigenvalues of groups of which both factors were accepted, and counts
// consecutive failures. keep: null: true; else nothing changes where it is false.
cudaError_t take_inverses(const Table<InverseEntry>& factors, const bool* keep,
                          cudaStream_t stream);

}  // namespace torchium::cuda_kernels
