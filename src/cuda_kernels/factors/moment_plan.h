// The plan of a moment_product(): boxes, tiles and shares.
#pragma once

#include "cuda_kernels/factors/moment_product.h"
#include "cuda_kernels/split_gemm/tile_map.h"

#include <cstdint>

namespace torchium::cuda_kernels {

template <typename Integer>
__host__ __device__ constexpr Integer pieces_of(Integer size, Integer piece) {
  return (size + piece - 1) / piece;
}

// The fewest boxes that cover a view, and the widest of those. With a stride of 1.
BoxOfPixels moment_box(const MomentProduct::View& view, int64_t samples);

int64_t moment_boxes_per_shift(const MomentProduct& product);

}  // namespace torchium::cuda_kernels
