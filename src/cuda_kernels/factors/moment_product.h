// X^T X for 16-bit vectors in the rows of X, on Hopper's tensor cores: only the tiles on and below
// the diagonal.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

struct MomentProduct {
  const void* X;     // [count, pitch], aligned to 16 bytes
  int64_t count;     // of vectors
  int n;             // elements of a vector
  int pitch;         // a multiple of 8
  bool is_bfloat16;  // not fp16
};

// How a product is cut. A cluster of two blocks takes the same share of all terms as every other,
// so that it may begin and end within a tile, and writes each tile's part of the sum to a place of
// its own in the workspace. Parts of a tile follow each other: those of tile t by the clusters c
// that work on it are parts t + c.
struct MomentParts {
  static constexpr int kTile = 256;
  static constexpr int kTerms = 64;  // of a stage
  int tiles;
  int stages;    // per tile
  int share;     // stages per cluster
  int clusters;  // that have a share

  // Floats in the workspace.
  int64_t elements() const { return int64_t{tiles + clusters} * kTile * kTile; }
};

bool has_moment_product(int major, int minor, int shared_bytes);
// Whether the kernel takes the product, and such tiles are less work than the whole matrix.
bool fits_moment_product(const MomentProduct& product);

// For the current device.
cudaError_t plan_moment_product(const MomentProduct& product, MomentParts& parts);

cudaError_t moment_product(const MomentProduct& product, const MomentParts& parts, float* workspace,
                           cudaStream_t stream);

}  // namespace torchium::cuda_kernels
