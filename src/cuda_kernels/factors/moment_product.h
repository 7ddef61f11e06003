// Sums of outer products of 16-bit vectors on Hopper's tensor cores: X^T X for the vectors in the
// rows of X, and products of the pixels of images with those of shifted images.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// [samples, height, width, channels], channels side by side. The rows of a matrix are the pixels of
// one image of height 1. Pixels may overlap.
struct Images {
  const void* data;  // aligned to 16 bytes
  int64_t samples, height, width;
  int channels;
  int64_t pixel_pitch, row_pitch, sample_pitch;  // elements, multiples of 8
  bool is_bfloat16;                              // not fp16
};

// Without gaps between pixels.
Images contiguous_images(const void* data, int64_t samples, int64_t height, int64_t width,
                         int channels, bool is_bfloat16);

struct Shift {
  int y, x;
};

// Products R^T C, summed over the pixels p of a view, of vectors R and C that are several shifted
// pixels side by side: shift s of a vector is images[stride * p + s], zero outside of an image, and
// zeros up to a multiple of 64 elements.
struct MomentProduct {
  static constexpr int kMostViews = 12, kMostProducts = 32, kMostShifts = 64;
  // All p with 0 <= y < height and 0 <= x < width in all samples. An exact view has no other p;
  // otherwise p beyond may count too. A size of 1 is always exact.
  struct View {
    int64_t height, width;
    bool is_exact;
  };
  struct Factors {
    int view;
    int rows, columns;  // the first shift of R and of C
  };

  Images images;
  Shift stride;
  int shifts;  // of R, and of C
  int views, products;
  View view[kMostViews];
  Factors product[kMostProducts];
  Shift shift[kMostShifts];
};

// X^T X.
MomentProduct product_of_rows(const Images& X);

// The 256 x 256 tiles of a product: all, or those on and below the diagonal if R and C are the
// same; they are numbered row by row. The upper right quarter of a tile on the diagonal is not
// computed.
struct TileSeries {
  int first_tile, first_unit;  // of the tiles and units of all products
  int stages;                  // per tile
  int tile_rows;               // also columns
  bool is_triangular;
};

// How products are cut. The work of a stage is 4 units, on the diagonal 3. A cluster of two blocks
// takes the stages that begin in the same share of all units as every other, so that it may begin
// and end within a tile, and writes each tile's part of the sum to a place of its own in the
// workspace. Parts of a tile follow each other: those of tile t by the clusters c that work on it
// are parts t + c.
struct MomentParts {
  static constexpr int kBlocks = 2;  // of a cluster
  static constexpr int kTile = 256;
  static constexpr int kTerms = 64;  // of a stage
  static constexpr int kUnits = 4, kUnitsOnDiagonal = 3;
  int tiles, units;  // of all products
  int share;         // units per cluster
  int clusters;      // that have a share
  TileSeries series[MomentProduct::kMostProducts];

  double multiplications() const { return double{kTile} * kTile * kTerms / kUnits * units; }
  // Floats in the workspace.
  int64_t elements() const { return int64_t{tiles + clusters} * kTile * kTile; }
};

bool has_moment_product(int major, int minor, int shared_bytes);

// For the current device. No clusters: there are no stages, or more than an int counts.
cudaError_t plan_moment_product(const MomentProduct& product, MomentParts& parts);

// Whether the kernel does better than a product of the whole matrix X^T X, with n columns in X.
bool saves_work(const MomentParts& parts, int64_t n);

cudaError_t moment_product(const MomentProduct& product, const MomentParts& parts, float* workspace,
                           cudaStream_t stream);

}  // namespace torchium::cuda_kernels
