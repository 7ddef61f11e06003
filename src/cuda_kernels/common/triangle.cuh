// Tiles on and below the diagonal of a matrix, numbered row by row.
#pragma once

namespace torchium::cuda_kernels {

__host__ __device__ inline int triangle_tiles(int rows) { return rows * (rows + 1) / 2; }

struct TriangleTile {
  int row, column;

  __device__ explicit TriangleTile(int index)
      : row(static_cast<int>((sqrtf(8.0f * static_cast<float>(index) + 1) - 1) / 2)) {
    while (triangle_tiles(row) > index) --row;
    while (triangle_tiles(row + 1) <= index) ++row;
    column = index - triangle_tiles(row);
  }
};

}  // namespace torchium::cuda_kernels
