#include "linalg/symmetric_update.h"

#include "linalg/symmetric_storage.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// The lower triangle is cut into tiles of this many rows and at most so many columns: below 128
// rows GEMM loses more speed than smaller tiles on the diagonal save, and tiles as wide as the
// matrix cannot be shared evenly among threads.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 256;
// Below this order one full product is as fast.
constexpr int64_t kMinTiledOrder = 192;

struct Tile {
  int64_t matrix, row, rows, column, columns;
};

// Tiles that cover the lower triangles of all matrices.
std::vector<Tile> lower_tiles(int64_t matrices, int64_t n) {
  std::vector<Tile> tiles;
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    for (int64_t row = 0; row < n; row += kTileRows) {
      const int64_t rows = std::min(kTileRows, n - row);
      for (int64_t column = 0; column < row + rows; column += kTileColumns) {
        tiles.push_back({matrix, row, rows, column, std::min(kTileColumns, row + rows - column)});
      }
    }
  }
  return tiles;
}

// Shares the tiles out by area. One parallel region for all of them, with serial GEMMs inside,
// waits once where threaded GEMMs would wait at every tile.
template <typename Body>
void for_each_tile(const std::vector<Tile>& tiles, const Body& body) {
  std::vector<int64_t> area(tiles.size() + 1, 0);
  for (size_t i = 0; i < tiles.size(); ++i) {
    area[i + 1] = area[i] + tiles[i].rows * tiles[i].columns;
  }
  const auto first_tile = [&](int64_t share, int64_t shares) {
    // The tile whose middle lies behind the border of the share.
    const auto border = std::lower_bound(tiles.begin(), tiles.end(), share * area.back() / shares,
                                         [&](const Tile& tile, int64_t at) {
                                           const size_t i = &tile - tiles.data();
                                           return (area[i] + area[i + 1]) / 2 < at;
                                         });
    return border - tiles.begin();
  };
  const int64_t shares = std::min<int64_t>(at::get_num_threads(), tiles.size());
  at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    // A worker thread has its own dispatch state.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t i = first_tile(begin, shares); i < first_tile(end, shares); ++i) {
      body(tiles[i]);
    }
  });
}

// C <- beta C + alpha X Y, where the result is symmetric.
void symmetric_addmm_(at::Tensor& C, const at::Tensor& X, const at::Tensor& Y, double beta,
                      double alpha) {
  const int64_t n = C.size(1);
  if (!C.is_cpu() || n < kMinTiledOrder) {
    C.baddbmm_(X, Y, beta, alpha);
  } else {
    for_each_tile(lower_tiles(C.size(0), n), [&](const Tile& tile) {
      C.select(0, tile.matrix)
          .narrow(0, tile.row, tile.rows)
          .narrow(1, tile.column, tile.columns)
          .addmm_(X.select(0, tile.matrix).narrow(0, tile.row, tile.rows),
                  Y.select(0, tile.matrix).narrow(1, tile.column, tile.columns), beta, alpha);
    });
  }
  mirror_lower_(C);
}

}  // namespace

void symmetric_update_(at::Tensor& C, const at::Tensor& X, double beta, double alpha) {
  symmetric_addmm_(C, X, X.mT(), beta, alpha);
}

void symmetric_product_out(at::Tensor& C, const at::Tensor& X, const at::Tensor& Y) {
  symmetric_addmm_(C, X, Y, 0.0, 1.0);
}

}  // namespace torchium::linalg::detail
