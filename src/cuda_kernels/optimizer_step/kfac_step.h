// The elementwise work of a K-FAC step on a GPU, for all parameters at once: on the factors, on the
// gradients before the matrix products, and on the directions after them. Symbols as in
// optim/kfac/kfac_step.cpp.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// A factor of a layer, A or G, or the blocks of a norm.
struct FactorEntry {
  float* factor;
  const float* sum;  // of this step; null: the factor stays
  float* updates;    // k of the layer
  double scale;      // of the sum
  double stat_decay;
  int64_t elements;
  int order;  // of symmetric matrices, of which one half is read; 0: elements without that
  int first_tile;
  bool counts;  // one entry of each layer does
};
// Elements of a tile, and rows and columns of one on or below the diagonal of a matrix.
constexpr int kFactorTile = 1 << 13, kFactorSide = 64;
int factor_tiles(int64_t elements, int order);

// k <- k + 1 for layers with sums. Nothing where the step is skipped.
cudaError_t count_factor_updates(const Table<FactorEntry>& factors, const StepControl* control,
                                 cudaStream_t stream);

// F <- d F + (1 - d) scale sum with d = min(1 - 1/k, stat_decay). Nothing where the step is
// skipped.
cudaError_t update_factors(const Table<FactorEntry>& factors, const StepControl* control,
                           cudaStream_t stream);

// Two buffers, each with room for V of all layers: every product goes from one to the other.
struct KfacBuffers {
  float *first, *second;
};

// A parameter as a matrix; its gradient (in StepNumbers) and its momentum buffer have the same
// layout. Weight and bias of a layer are columns of one packed matrix V, contiguous.
struct KfacEntry {
  void* param;
  float* momentum_buffer;     // null: no momentum
  const float *left, *right;  // roots that are diagonals: of each row, and of each column and group
  int64_t start;              // of V in the first buffer; -1: of no layer
  unsigned* largest;          // raised to the largest magnitude in V, as bits; null: not computed
  LearningRate lr;
  float momentum, weight_decay;
  int rows, columns;
  // Column c of a row lies at c / inner * outer_stride + c % inner * inner_stride.
  int row_stride, inner, inner_stride, outer_stride;
  int packed_columns, first_column;  // of V, and of this parameter there
  int group_rows;                    // rows of V that belong to one group
  int first_tile;
  int index;  // of the parameter in the step
  ElementType param_type, grad_type;
  bool maximize;
  bool in_second;  // where the products leave the direction; else in the first buffer
};
constexpr int kKfacTile = 1 << 13;  // elements

// V = g + weight_decay p, times the roots that are diagonals; zero where the step is skipped.
cudaError_t gather_kfac(const Table<KfacEntry>& parameters, const StepControl* control,
                        const StepNumbers* numbers, const KfacBuffers& buffers,
                        cudaStream_t stream);

// A layer whose V is in the eigenvectors of A and G.
struct EigenvalueEntry {
  int64_t start;                            // in a buffer
  const float *left_values, *right_values;  // of G, [rows], and of A, [groups, columns]
  const float *left, *right;                // as in KfacEntry
  float damping;
  int elements, columns, group_rows;
  int first_tile;
  bool in_second;
};

// V <- V / (lambda_G lambda_A^T + damping), or V for a group without eigenvalues yet (-1); times
// the roots that are diagonals.
cudaError_t divide_by_eigenvalues(const Table<EigenvalueEntry>& layers, const KfacBuffers& buffers,
                                  cudaStream_t stream);

// A norm with the V of its scale and of its shift in the first buffer.
struct UnitwiseEntry {
  const float* blocks;   // F: [channels, order, order]
  int64_t scale, shift;  // starts; shift -1: none
  double damping;
  int channels, order;
  int first_tile;
};
constexpr int kUnitwiseTile = 256;  // channels

// (V, V') <- (F + damping I)^-1 (V, V') for each channel; without a shift V <- V / (F[0, 0] +
// damping).
cudaError_t solve_unitwise(const Table<UnitwiseEntry>& norms, const KfacBuffers& buffers,
                           cudaStream_t stream);

// lr^2 sum d . V, for each tile; zero for parameters of no layer.
cudaError_t sum_products(const Table<KfacEntry>& parameters, const StepNumbers* numbers,
                         const KfacBuffers& buffers, double* products, cudaStream_t stream);

// *scale <- min(1, sqrt(kl_clip / |sum of the products|))
cudaError_t clip_by_products(const double* products, int count, double kl_clip, double* scale,
                             cudaStream_t stream);

// buf <- momentum buf + nu d; p <- p - lr buf. Nothing where the step is skipped. scale: nu, of
// parameters of layers; null: 1.
cudaError_t update_by_kfac(const Table<KfacEntry>& parameters, const StepControl* control,
                           const StepNumbers* numbers, const KfacBuffers& buffers,
                           const double* scale, cudaStream_t stream);

// Writes the addresses of matrices to arrays that cuBLAS reads. Entries are `count` matrices side
// by side: [rows, columns] in both buffers, left [rows, rows], right [columns, columns]. One tile
// each.
struct AddressEntry {
  int64_t start;  // in the buffers
  float *left, *right;
  int place;  // in the arrays
  int count, rows, columns;
  int first_tile;
};
struct AddressArrays {
  float **first, **second, **left, **right;
};
cudaError_t write_addresses(const Table<AddressEntry>& entries, const KfacBuffers& buffers,
                            const AddressArrays& arrays, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
