#include "linalg/products/symmetric_update.h"

#include "linalg/products/symmetric_storage.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// The lower triangle is cut into row panels of at most this many rows: with fewer rows, GEMM loses
// more speed than smaller diagonal blocks save.
constexpr int64_t kPanelRows = 128;
// Below this order one full product is as fast, for any number of threads.
constexpr int64_t kMinTiledOrder = 192;

// Rows of the panels: an even share of the matrix, in whole vectors.
int64_t panel_rows(int64_t n) {
  const int64_t panels = (n + kPanelRows - 1) / kPanelRows;
  return at::round_up<int64_t>((n + panels - 1) / panels, 16);
}

// Tiles pay off if every thread gets some of full size. Otherwise the threaded GEMM of a full
// product is faster: on two cores below n = 384 for one matrix, on eight below n = 900.
bool use_tiles(int64_t matrices, int64_t n) {
  const double panels = static_cast<double>(n) / kPanelRows;
  return n >= kMinTiledOrder &&
         static_cast<double>(matrices) * panels * (panels + 1) / 2 >= 3.0 * at::get_num_threads();
}

// Rows [row, row + rows) and columns [column, column + columns) of one matrix.
struct LowerTile {
  int64_t matrix, row, rows, column, columns;
  int64_t area() const { return rows * columns; }
};

// Tiles that cover the lower triangles of all matrices: panels, cut only if larger than a thread's
// share. A diagonal block is never cut, so tiles can be mirrored independently.
std::vector<LowerTile> lower_tiles(int64_t matrices, int64_t n, int64_t threads) {
  const int64_t height = panel_rows(n);
  const int64_t share = std::max<int64_t>(1, matrices * n * (n + height) / 2 / threads);
  std::vector<LowerTile> tiles;
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    for (int64_t row = 0; row < n; row += height) {
      const int64_t rows = std::min(height, n - row);
      const int64_t cuts = (rows * (row + rows) + share - 1) / share;
      const int64_t width = at::round_up<int64_t>((row + rows + cuts - 1) / cuts, 16);
      int64_t column = 0;
      for (; column + width < row; column += width) {
        tiles.push_back({matrix, row, rows, column, width});
      }
      tiles.push_back({matrix, row, rows, column, row + rows - column});
    }
  }
  return tiles;
}

// Tiles of each thread: the largest first, each to the thread with the least work so far.
std::vector<std::vector<LowerTile>> share_out(std::vector<LowerTile> tiles, int64_t threads) {
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const LowerTile& a, const LowerTile& b) { return a.area() > b.area(); });
  std::vector<std::vector<LowerTile>> shares(threads);
  std::vector<int64_t> work(threads, 0);
  for (const LowerTile& tile : tiles) {
    const auto least = std::min_element(work.begin(), work.end()) - work.begin();
    shares[least].push_back(tile);
    work[least] += tile.area();
  }
  return shares;
}

// One parallel region for all tiles, with serial GEMMs inside, synchronises once; threaded GEMMs
// would at every tile.
void tiled_addmm_(at::Tensor& C, const at::Tensor& X, const at::Tensor& Y, double beta,
                  double alpha) {
  const int64_t threads = at::get_num_threads();
  const auto shares = share_out(lower_tiles(C.size(0), C.size(1), threads), threads);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    // A worker thread has its own dispatch state.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t share = begin; share < end; ++share) {
      for (const auto& [matrix, row, rows, column, columns] : shares[share]) {
        at::Tensor result = C.select(0, matrix);
        result.narrow(0, row, rows)
            .narrow(1, column, columns)
            .addmm_(X.select(0, matrix).narrow(0, row, rows),
                    Y.select(0, matrix).narrow(1, column, columns), beta, alpha);
        mirror_lower_tile_(result, row, rows, column, columns);
      }
    }
  });
}

// C <- beta C + alpha X Y, where the result is symmetric.
void symmetric_addmm_(at::Tensor& C, const at::Tensor& X, const at::Tensor& Y, double beta,
                      double alpha) {
  const at::NoTF32Guard full_precision;
  if (C.is_cpu() && use_tiles(C.size(0), C.size(1))) {
    tiled_addmm_(C, X, Y, beta, alpha);
  } else if (X.scalar_type() != C.scalar_type()) {
    at::baddbmm_out(C, C, X, Y, C.scalar_type(), beta, alpha);
    mirror_lower_(C);
  } else {
    C.baddbmm_(X, Y, beta, alpha);
    mirror_lower_(C);
  }
}

}  // namespace

void symmetric_update_(at::Tensor& C, const at::Tensor& X, double beta, double alpha) {
  symmetric_addmm_(C, X, X.mT(), beta, alpha);
}

void symmetric_product_out(at::Tensor& C, const at::Tensor& X, const at::Tensor& Y) {
  symmetric_addmm_(C, X, Y, 0.0, 1.0);
}

}  // namespace torchium::linalg::detail
