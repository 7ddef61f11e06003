// Sums of outer products of 16-bit vectors on Hopper's tensor cores: X^T X for the vectors in the
// rows of X, and products of the pixels of images with those of shifted images.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// [samples, height, width, channels], channels side by side. The rows of a matrix are the pixels of
// one image of height 1.
struct Images {
  const void* data;  // aligned to 16 bytes
  int64_t samples, height, width;
  int channels;
  int64_t pitch;     // elements from pixel to pixel, a multiple of 8
  bool is_bfloat16;  // not fp16
};

struct Shift {
  int y, x;
};

// A tile is 256 x 256. Its rows and its columns come in four boxes of 64 channels, each with its
// own shift: element (i, j) is the sum over pixels p of images[p + rows][i] images[p + columns][j],
// with zeros outside of an image.
struct ShiftedProduct {
  static constexpr int kBoxes = 4;
  int view;  // the range of p
  Shift rows[kBoxes], columns[kBoxes];
};

struct MomentProduct {
  static constexpr int kMostViews = 4, kMostProducts = 32;
  // All p with 0 <= y < height and 0 <= x < width in all samples. Both are those of the images, or
  // larger, or 1.
  struct View {
    int64_t height, width;
  };

  Images images;
  // Channels of the boxes in a tile: 256, and then as many tiles as all channels need, or 128 or
  // 64, in 2 or 4 groups of boxes with a shift each.
  int block;
  int views, products;
  View view[kMostViews];
  ShiftedProduct product[kMostProducts];
};

// X^T X.
MomentProduct product_of_rows(const Images& X);

// The tiles of a product: all, or those on and below the diagonal if rows and columns have the same
// shifts; they are numbered row by row.
struct TileSeries {
  int first_tile, first_stage;  // of the tiles and stages of all products
  int stages;                   // per tile
  bool is_triangular;
};

// How products are cut. A cluster of two blocks takes the same share of the stages of all tiles as
// every other, so that it may begin and end within a tile, and writes each tile's part of the sum
// to a place of its own in the workspace. Parts of a tile follow each other: those of tile t by the
// clusters c that work on it are parts t + c.
struct MomentParts {
  static constexpr int kTile = 256;
  static constexpr int kTerms = 64;  // of a stage
  int tiles, stages;                 // of all products
  int channel_tiles;                 // per row of the tiles of a product
  int share;                         // stages per cluster
  int clusters;                      // that have a share
  TileSeries series[MomentProduct::kMostProducts];

  double multiplications() const { return double{kTile} * kTile * kTerms * stages; }
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
