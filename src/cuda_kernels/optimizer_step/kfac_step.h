// The elementwise work of a K-FAC step on a GPU, for all parameters at once: on the gradients
// before the matrix products, and on the directions after them. Symbols as in
// optim/kfac/kfac_step.cpp.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// A parameter as a matrix; its gradient and its momentum buffer have the same layout. Weight and
// bias of a layer are columns of one packed matrix V, contiguous.
struct KfacEntry {
  void* param;
  const void* grad;
  float* momentum_buffer;     // null: no momentum
  float* gathered;            // V of its layer; null: of no layer
  const float* direction;     // of its layer: what the products made of V
  const float *left, *right;  // roots that are diagonals: of each row, and of each column and group
  LearningRate lr;
  float momentum, weight_decay;
  int rows, columns;
  // Column c of a row lies at c / inner * outer_stride + c % inner * inner_stride.
  int row_stride, inner, inner_stride, outer_stride;
  int packed_columns, first_column;  // of V, and of this parameter there
  int group_rows;                    // rows of V that belong to one group
  int first_tile;
  ElementType param_type, grad_type;
  bool maximize;
};
constexpr int kKfacTile = 1 << 13;  // elements

// V = g + weight_decay p, times the roots that are diagonals; zero where the step is skipped.
cudaError_t gather_kfac(const Table<KfacEntry>& parameters, const StepControl* control,
                        cudaStream_t stream);

// A layer whose V is in the eigenvectors of A and G.
struct EigenvalueEntry {
  float* rotated;
  const float *left_values, *right_values;  // of G, [rows], and of A, [groups, columns]
  const float *left, *right;                // as in KfacEntry
  float damping;
  int elements, columns, group_rows;
  int first_tile;
};

// V <- V / (lambda_G lambda_A^T + damping), or V for a group without eigenvalues yet (-1); times
// the roots that are diagonals.
cudaError_t divide_by_eigenvalues(const Table<EigenvalueEntry>& layers, cudaStream_t stream);

// lr^2 sum d . V, for each tile; zero for parameters of no layer.
cudaError_t sum_products(const Table<KfacEntry>& parameters, double* products, cudaStream_t stream);

// *scale <- min(1, sqrt(kl_clip / |sum of the products|))
cudaError_t clip_by_products(const double* products, int tiles, double kl_clip, float* scale,
                             cudaStream_t stream);

// buf <- momentum buf + nu d; p <- p - lr buf. Nothing where the step is skipped. scale: nu, of
// parameters of layers; null: 1.
cudaError_t update_by_kfac(const Table<KfacEntry>& parameters, const StepControl* control,
                           const float* scale, cudaStream_t stream);

// Writes the addresses of matrices to arrays that cuBLAS reads. Entries are `count` matrices side
// by side: front and back [rows, columns], left [rows, rows], right [columns, columns]. One tile
// each.
struct AddressEntry {
  float *front, *back, *left, *right;
  int place;  // in the arrays
  int count, rows, columns;
  int first_tile;
};
struct AddressArrays {
  float **front, **back, **left, **right;
};
cudaError_t write_addresses(const Table<AddressEntry>& entries, const AddressArrays& arrays,
                            cudaStream_t stream);

}  // namespace torchium::cuda_kernels
