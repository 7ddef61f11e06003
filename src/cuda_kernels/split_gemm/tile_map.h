// Tensor maps for Hopper's copy engine.
#pragma once

#include "cuda_kernels/split_gemm/split_fp16.h"
#include "cuda_kernels/split_gemm/split_matrices.h"

#include <cstdint>
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// A box: 64 rows of 128 bytes (32 columns of split matrices, or 64 of single ones), laid out as in
// wgmma.cuh; zeros outside the matrix.
constexpr int kBoxRows = 64;
constexpr int kBoxElements = 64;  // of a row
constexpr int kBoxBytes = kBoxRows * kBoxElements * 2;

using TileMap = CUtensorMap;

// Coordinates: half of the row, row, matrix.
cudaError_t make_tile_map(const SplitMatrices& matrices, int64_t count, bool single, TileMap& map);

// A box of 64 rows and 64 columns. Coordinates: column, row, matrix, part: 0 for hi, 1 for lo,
// which is zero if absent. between: elements from a matrix to the next, a multiple of 8; 0: they
// are contiguous.
cudaError_t make_tile_map(const SplitFp16& batch, int64_t matrices, TileMap& map,
                          int64_t between = 0);

// The 64 pixels of a box, each `stride` pixels from the next.
struct BoxOfPixels {
  int width, height, samples;
  int stride_x, stride_y;
};

// 16-bit images [samples, height, width, channels]; pitches in elements, multiples of 8.
struct TiledImages {
  const void* data;
  int64_t samples, height, width, channels;
  int64_t sample_pitch, row_pitch, pixel_pitch;
};

// A box of 64 channels of 64 pixels, which are its rows. Coordinates: channel, x, y, sample; zeros
// outside an image on every side.
cudaError_t make_tile_map(const TiledImages& images, const BoxOfPixels& box, TileMap& map);

// A box of 32 columns of a float32 matrix [rows, columns], and `box_rows` rows. Coordinates: half
// of the column's bytes, row, 0. The address and the bytes of a row are multiples of 16.
cudaError_t make_tile_map(const float* matrix, int64_t rows, int64_t columns, int box_rows,
                          TileMap& map);

}  // namespace torchium::cuda_kernels
