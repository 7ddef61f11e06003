// Tiles of a moment_product(), and sums of the parts of them that it leaves in its workspace.
#pragma once

#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/factors/moment_product.h"

namespace torchium::cuda_kernels {

struct MomentTile {
  int index;        // in its series
  int row, column;  // in tiles
  int unit;         // the first
  int units;        // per stage
};

__device__ inline MomentTile moment_tile(const TileSeries& series, int row, int column) {
  const bool is_triangular = series.is_triangular;
  const int index = is_triangular ? triangle_tiles(row) + column : row * series.tile_rows + column;
  const int on_diagonal = is_triangular ? row : 0;  // of the tiles before
  const int before = MomentParts::kUnits * index -
                     (MomentParts::kUnits - MomentParts::kUnitsOnDiagonal) * on_diagonal;
  return {index, row, column, series.first_unit + series.stages * before,
          is_triangular && row == column ? MomentParts::kUnitsOnDiagonal : MomentParts::kUnits};
}

// The tile with a unit of the series.
__device__ inline MomentTile moment_tile_at(const TileSeries& series, int unit) {
  const int place = (unit - series.first_unit) / series.stages;
  if (!series.is_triangular) {
    const int index = place / MomentParts::kUnits;
    return moment_tile(series, index / series.tile_rows, index % series.tile_rows);
  }
  // Rows before row r have 2 r^2 + r units per stage.
  int row = static_cast<int>((sqrtf(8.0f * static_cast<float>(place) + 1) - 1) / 4);
  while (2 * row * row + row > place) --row;
  while (2 * (row + 1) * (row + 1) + row + 1 <= place) ++row;
  return moment_tile(series, row, (place - 2 * row * row - row) / MomentParts::kUnits);
}

struct PartRange {
  int first, last;  // clusters that work on the tile
};

__device__ inline PartRange parts_of(const TileSeries& series, const MomentTile& tile, int share) {
  return {tile.unit / share, (tile.unit + tile.units * (series.stages - 1)) / share};
}

// Parts [256, 256] of a tile follow each other.
__device__ inline const float* first_part(const float* workspace, const TileSeries& series,
                                          const MomentTile& tile, const PartRange& range) {
  return workspace + int64_t{series.first_tile + tile.index + range.first} * MomentParts::kTile *
                         MomentParts::kTile;
}

// Of an element, from that of the first part on.
__device__ inline float sum_of_parts(const float* first, int count) {
  float sum = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) sum += first[i * MomentParts::kTile * MomentParts::kTile];
  return sum;
}

// Of four adjacent ones.
__device__ inline float4 sum_of_vectors(const float* first, int count) {
  float4 sum{};
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const float4 part =
        *reinterpret_cast<const float4*>(first + i * MomentParts::kTile * MomentParts::kTile);
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
  }
  return sum;
}

}  // namespace torchium::cuda_kernels
