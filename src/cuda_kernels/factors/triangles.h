// Symmetric matrices and their lower triangles, of many in few launches.
#pragma once

#include "cuda_kernels/common/parameter_table.h"
#include "cuda_kernels/common/triangle.cuh"

#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// Matrices of order n, one after the other, and their triangles: n (n + 1) / 2 numbers each, row by
// row.
struct TriangleEntry {
  float* matrices;
  float* triangles;
  int n;
  int first_tile;

  static constexpr int kTile = 64;  // rows and columns
  __host__ __device__ int tiles_per_matrix() const {
    return triangle_tiles((n + kTile - 1) / kTile);
  }
};

// Of each matrix the lower triangle.
cudaError_t pack_triangles(const Table<TriangleEntry>& entries, cudaStream_t stream);
// Fills both triangles of each matrix.
cudaError_t unpack_triangles(const Table<TriangleEntry>& entries, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
