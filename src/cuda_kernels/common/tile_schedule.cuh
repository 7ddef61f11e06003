// The order in which clusters of two blocks process the tiles of symmetric matrices.
#pragma once

#include <cstdint>

namespace torchium::cuda_kernels {

constexpr int kProductTile = 128;

struct TilePosition {
  int matrix;       // may be past the last one
  int row, column;  // first ones
  bool shares_row;  // with the tile of the other block: the same matrix and row
};

// Tiles on and below the diagonal: horizontally adjacent pairs, then the remaining tiles, on the
// diagonal of even rows, from two matrices. So both blocks always have work, except possibly for
// the last pair.
class TileSchedule {
 public:
  __host__ __device__ TileSchedule(int order, int64_t matrices)
      : in_rows_(square_quarter((order + kProductTile - 1) / kProductTile)),
        left_over_(((order + kProductTile - 1) / kProductTile + 1) / 2),
        pairs_(static_cast<int>((matrices + 1) / 2 * (2 * in_rows_ + left_over_))) {}

  __host__ __device__ int pairs() const { return pairs_; }

  // The tile of block `rank` (0 or 1).
  __device__ TilePosition tile(int pair, uint32_t rank) const {
    const int per_two = 2 * in_rows_ + left_over_;
    const int first_matrix = pair / per_two * 2;
    const int index = pair % per_two;
    if (index < 2 * in_rows_) {
      const int in_matrix = index % in_rows_;
      int row = static_cast<int>(2 * sqrtf(static_cast<float>(in_matrix)));
      while (square_quarter(row) > in_matrix) --row;
      while (square_quarter(row + 1) <= in_matrix) ++row;
      const int column = 2 * (in_matrix - square_quarter(row)) + static_cast<int>(rank);
      return {first_matrix + index / in_rows_, row * kProductTile, column * kProductTile, true};
    }
    const int last = 2 * (index - 2 * in_rows_) + static_cast<int>(rank);
    const int row = last % left_over_ * 2 * kProductTile;
    return {first_matrix + last / left_over_, row, row, false};
  }

 private:
  // Pairs in the rows before row i: the sum of (r + 1) / 2 for r < i.
  __host__ __device__ static int square_quarter(int i) { return i * i / 4; }

  int in_rows_, left_over_, pairs_;
};

}  // namespace torchium::cuda_kernels
