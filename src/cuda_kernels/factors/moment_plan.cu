#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/factors/moment_plan.h"

#include <algorithm>
#include <limits>

namespace torchium::cuda_kernels {
namespace {

using View = MomentProduct::View;
constexpr int kTile = MomentParts::kTile;
constexpr int kTerms = MomentParts::kTerms;
constexpr int kBoxes = kTile / kBoxElements;  // of the rows and of the columns of a tile
// Units per cluster: fewer take longer to add up than they save.
constexpr int kLeastShare = 16 * MomentParts::kUnits;
constexpr int kLongShare = 48 * MomentParts::kUnits;

// Boxes along a side of a view, or 0: they cannot cover it.
int64_t boxes_along(int64_t size, int box, bool is_exact) {
  return (is_exact || size == 1) && size % box != 0 ? 0 : pieces_of<int64_t>(size, box);
}

int64_t boxes_of(const View& view, int64_t samples) {
  const BoxOfPixels box = moment_box(view, samples);
  return pieces_of<int64_t>(view.width, box.width) * pieces_of<int64_t>(view.height, box.height) *
         pieces_of<int64_t>(samples, box.samples);
}

bool has_same_factors(const MomentProduct& product, const MomentProduct::Factors& factors) {
  const Shift* rows = product.shift + factors.rows;
  return std::equal(rows, rows + product.shifts, product.shift + factors.columns,
                    [](const Shift& a, const Shift& b) { return a.y == b.y && a.x == b.x; });
}

}  // namespace

BoxOfPixels moment_box(const View& view, int64_t samples) {
  BoxOfPixels best{};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int width = kTerms; width > 0; width /= 2) {
    for (int height = kTerms / width; height > 0; height /= 2) {
      const int depth = kTerms / width / height;
      const int64_t boxes = boxes_along(view.width, width, view.is_exact) *
                            boxes_along(view.height, height, view.is_exact) *
                            pieces_of<int64_t>(samples, depth);
      if (boxes > 0 && boxes < least) {
        least = boxes;
        best = {width, height, depth, 1, 1};
      }
    }
  }
  return best;
}

int64_t moment_boxes_per_shift(const MomentProduct& product) {
  return pieces_of<int64_t>(product.images.channels, kBoxElements);
}

Images contiguous_images(const void* data, int64_t samples, int64_t height, int64_t width,
                         int channels, bool is_bfloat16) {
  return {data,       samples,  height,           width,
          channels,   channels, width * channels, height * width * channels,
          is_bfloat16};
}

MomentProduct product_of_rows(const Images& X) {
  MomentProduct product{};
  product.images = X;
  product.stride = {1, 1};
  product.shifts = product.views = product.products = 1;
  product.view[0] = {X.height, X.width, false};
  return product;
}

cudaError_t plan_moment_product(const MomentProduct& product, MomentParts& parts) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  if (error != cudaSuccess) return error;
  parts = {};
  const Images& images = product.images;
  const int64_t rows = pieces_of<int64_t>(product.shifts * moment_boxes_per_shift(product), kBoxes);
  int64_t tiles = 0, units = 0;
  for (int i = 0; i < product.products; ++i) {
    const int64_t stages = boxes_of(product.view[product.product[i].view], images.samples);
    const bool is_triangular = has_same_factors(product, product.product[i]);
    const int64_t own = is_triangular ? rows * (rows + 1) / 2 : rows * rows;
    parts.series[i] = {static_cast<int>(tiles), static_cast<int>(units), static_cast<int>(stages),
                       static_cast<int>(rows), is_triangular};
    tiles += own;
    units += (MomentParts::kUnits * own -
              (is_triangular ? rows : 0) * (MomentParts::kUnits - MomentParts::kUnitsOnDiagonal)) *
             stages;
    if (units > std::numeric_limits<int>::max() / 2) return cudaSuccess;
  }
  parts.tiles = static_cast<int>(tiles);
  parts.units = static_cast<int>(units);
  const int clusters = processors / MomentParts::kBlocks;
  parts.share = std::max(kLeastShare, (parts.units + clusters - 1) / clusters);
  parts.clusters = (parts.units + parts.share - 1) / parts.share;
  return cudaSuccess;
}

bool saves_work(const MomentParts& parts, int64_t n) {
  const int64_t elements = int64_t{parts.tiles} * kTile * kTile;
  const bool is_less = 10 * elements <= 9 * n * n;
  // cuBLAS's kernels for few columns and many rows are slower.
  const bool is_long = elements <= n * n && parts.share >= kLongShare;
  return is_less || is_long;
}

}  // namespace torchium::cuda_kernels
