#include "linalg/products/product_tiles.h"

#include <algorithm>
#include <cmath>

namespace torchium::linalg::detail {

int64_t aligned_size(int64_t size, int64_t limit) {
  return size >= limit           ? limit
         : size < kTileAlignment ? size
                                 : size / kTileAlignment * kTileAlignment;
}

double TileBytes::of(int64_t rows, int64_t columns) const {
  const auto m = static_cast<double>(rows), n = static_cast<double>(columns);
  return static_cast<double>(row) * m + static_cast<double>(column) * n +
         static_cast<double>(element) * m * n;
}

Tile choose_tile(int64_t m, int64_t n, const TileBytes& bytes, int64_t budget) {
  const auto fit = [budget](int64_t used, int64_t each, int64_t limit) {
    return each == 0 ? limit : aligned_size(std::max<int64_t>(1, (budget - used) / each), limit);
  };
  // The side of the square solves element side^2 + (row + column) side = budget.
  const double linear = static_cast<double>(bytes.row) + static_cast<double>(bytes.column);
  const double constant = static_cast<double>(budget);
  const double root =
      std::sqrt(linear * linear + 4.0 * static_cast<double>(bytes.element) * constant);
  const double side = std::clamp(2.0 * constant / (linear + root), 1.0, static_cast<double>(n));
  int64_t columns = aligned_size(static_cast<int64_t>(side), n);
  const int64_t rows = fit(bytes.column * columns, bytes.row + bytes.element * columns, m);
  columns = fit(bytes.row * rows, bytes.column + bytes.element * rows, n);
  return {rows, columns};
}

}  // namespace torchium::linalg::detail
