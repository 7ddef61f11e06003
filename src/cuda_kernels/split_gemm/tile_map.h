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

// A box of 64 rows and 64 columns of a 16-bit matrix. Coordinates: column, row, 0.
cudaError_t make_tile_map(const void* matrix, int64_t rows, int64_t columns, int64_t pitch,
                          TileMap& map);

}  // namespace torchium::cuda_kernels
