// Tiles of a matrix product that fit a workspace.
#pragma once

#include <cstdint>

namespace torchium::linalg::detail {

// Tiles of a multiple of this keep the alignment that fast kernels need: on an H200 a bfloat16
// product of order 8192 took 8.5 ms in tiles of 4095 columns and 1.76 ms in aligned ones.
constexpr int64_t kTileAlignment = 64;

// The largest aligned size up to `size`, or `limit` if that is less; below the alignment any size.
int64_t aligned_size(int64_t size, int64_t limit);

struct Tile {
  int64_t rows;
  int64_t columns;
};

// Bytes of workspace per row, column and element of a tile of the result.
struct TileBytes {
  int64_t row = 0;      // the copy of a row of A
  int64_t column = 0;   // the copy of a column of B
  int64_t element = 0;  // an element of the result, before it is rounded to the output dtype

  double of(int64_t rows, int64_t columns) const;
};

// A large tile of an [m, n] result whose workspace is at most `budget`: near square, then widened
// to the edges. The caller has checked that a 1 x 1 tile fits.
Tile choose_tile(int64_t m, int64_t n, const TileBytes& bytes, int64_t budget);

}  // namespace torchium::linalg::detail
