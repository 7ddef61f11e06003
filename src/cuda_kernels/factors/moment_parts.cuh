// Sums of the parts that a moment_product() leaves in its workspace.
#pragma once

#include "cuda_kernels/factors/moment_product.h"

namespace torchium::cuda_kernels {

struct PartRange {
  int first, last;  // clusters that work on the tile
};

// Tile `tile` of a series.
__device__ inline PartRange parts_of_tile(const TileSeries& series, int share, int tile) {
  const int begin = series.first_stage + tile * series.stages;
  return {begin / share, (begin + series.stages - 1) / share};
}

// Element `place` of tile `tile` of all products.
__device__ inline float sum_of_parts(const float* workspace, int tile, const PartRange& range,
                                     int place) {
  constexpr int kPart = MomentParts::kTile * MomentParts::kTile;
  const float* part = workspace + int64_t{tile + range.first} * kPart + place;
  float sum = 0;
#pragma unroll 8
  for (int cluster = range.first; cluster <= range.last; ++cluster, part += kPart) sum += *part;
  return sum;
}

}  // namespace torchium::cuda_kernels
