// Shared by all warps of a block of batched_product.h: the layout of shared memory, its barriers,
// the tiles of the block, and the producer thread that loads operands.
#pragma once

#include "cuda_kernels/common/pipeline.cuh"
#include "cuda_kernels/common/shared_address.cuh"
#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/split_gemm/batched_product.h"
#include "cuda_kernels/split_gemm/split_mma.cuh"
#include "cuda_kernels/split_gemm/tile_map.h"

#include <cstdint>

namespace torchium::cuda_kernels::batched_product_detail {

// Two warpgroups compute half of a tile's rows each, from stages in shared memory that a producer
// warp fills.
constexpr int kTile = 128;
constexpr int kGroups = 2;  // warpgroups that compute
constexpr int kConsumers = 128 * kGroups;
constexpr int kTileBytes = 2 * kBoxBytes;  // of one part of an operand, 64 terms deep

__host__ __device__ constexpr bool is_gram(ProductKind kind) {
  return kind == ProductKind::kRowGram || kind == ProductKind::kColumnGram ||
         kind == ProductKind::kGramParts;
}

// One warp's 16 rows of the result, padded so that few elements of a column share a bank.
constexpr int kStagedColumns = 16;
using Staged = float[16][kStagedColumns + 4];
constexpr int kChunks = kTile / kStagedColumns;

// Products of hi alone leave room for two blocks per multiprocessor: one stores while the other
// computes. Updates need the registers of both.
template <ProductKind kind, bool single>
struct Layout {
  static constexpr int kBlocks = single && !is_gram(kind) ? 2 : 1;
  // Products of two parts move registers between warpgroups.
  static constexpr int kThreads = kConsumers + (single ? 32 : 128);
  static constexpr int kParts = single ? 1 : 2;
  static constexpr int kOperandBytes = kParts * kTileBytes;
  static constexpr int kStages = 6 / kBlocks / kParts;
  static constexpr int kStageBytes = 2 * kOperandBytes;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kBarriersAt =
      kStagingAt + kConsumers / 32 * static_cast<int>(sizeof(Staged));
  static constexpr int kSharedBytes = kBarriersAt + 2 * 8 * kStages + 1024;
  static_assert(kBlocks * (kSharedBytes + 1024) <= 228 * 1024);
};

// The kernel's description of one batch. C is M x N, a sum over K terms.
struct ProductEntry {
  TileMap A, B;
  const float *scale_A, *scale_B;
  bool has_scales_A, has_scales_B;  // one scale per matrix, not one for all
  float* C;
  unsigned* largest;
  int M, N, K;
  int first_tile, tiles_of_matrix;
  int terms = 0;  // of all parts of a Gram matrix
};

// A kernel argument, limited to 32,764 bytes; large ones take longer to launch.
template <int capacity>
struct ProductTableOf {
  static constexpr int kCapacity = capacity;

  ProductEntry entries[kCapacity];
  int count = 0, tiles = 0;
  const GramUpdate* update = nullptr;
};
using ProductTable = ProductTableOf<32>;

__host__ __device__ inline int tiles_along(int size) { return (size + kTile - 1) / kTile; }

// Whether the terms of an operand run down columns in memory, not along rows.
__host__ __device__ constexpr bool across_A(ProductKind kind) {
  return kind == ProductKind::kColumnGram;
}
__host__ __device__ constexpr bool across_B(ProductKind kind) {
  return kind == ProductKind::kColumnGram || kind == ProductKind::kGeneral;
}

// Of one matrix.
inline int tiles_of_matrix(ProductKind kind, int M, int N) {
  const int rows = tiles_along(M), columns = tiles_along(N);
  return is_gram(kind) ? triangle_tiles(rows) : rows * columns;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <ProductKind kind>
struct Tile {
  const ProductEntry& product;
  int matrix, index, row, column;  // index: among the tiles of the matrix

  __device__ Tile(const ProductEntry& entry, int local)
      : product(entry),
        matrix(local / entry.tiles_of_matrix),
        index(local % entry.tiles_of_matrix) {
    if constexpr (is_gram(kind)) {
      const TriangleTile tile(index);
      row = tile.row * kTile;
      column = tile.column * kTile;
    } else {
      row = index / tiles_along(entry.N) * kTile;
      column = index % tiles_along(entry.N) * kTile;
    }
  }

  // Whether both operands are the same part of the same matrix.
  __device__ bool is_diagonal() const { return is_gram(kind) && row == column; }
  // The terms of the sum, and the matrix in memory that holds them.
  __device__ int begin() const { return kind == ProductKind::kGramParts ? matrix * product.K : 0; }
  __device__ int end() const {
    return kind == ProductKind::kGramParts ? min(product.terms, begin() + product.K) : product.K;
  }
  __device__ int plane() const { return kind == ProductKind::kGramParts ? 0 : matrix; }
  __device__ int stages() const { return (end() - begin() + kBoxElements - 1) / kBoxElements; }
  __device__ float* C() const { return product.C + int64_t{matrix} * product.M * product.N; }
};

// body(tile) for every tile of this block.
template <ProductKind kind, int capacity, typename Body>
__device__ void for_each_tile(const ProductTableOf<capacity>& table, const Body& body) {
  int entry = 0;
  for (int tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    while (entry + 1 < table.count && table.entries[entry + 1].first_tile <= tile) ++entry;
    body(Tile<kind>(table.entries[entry], tile - table.entries[entry].first_tile));
  }
}

template <ProductKind kind, bool single>
struct Shared {
  using L = Layout<kind, single>;
  char* memory;
  uint32_t start;  // its address

  __device__ explicit Shared(char* unaligned)
      : memory(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024),
        start(shared_address(memory)) {}

  __device__ Staged& staged(int warp) const {
    return reinterpret_cast<Staged*>(memory + L::kStagingAt)[warp];
  }
  __device__ uint32_t A(uint32_t slot) const { return start + slot * L::kStageBytes; }
  __device__ uint32_t B(uint32_t slot) const { return A(slot) + L::kOperandBytes; }
  // full: operands are in the stage. empty: all warpgroups are done with them.
  __device__ uint32_t full(uint32_t slot) const { return start + L::kBarriersAt + 8 * slot; }
  __device__ uint32_t empty(uint32_t slot) const { return full(L::kStages + slot); }

  __device__ void initialize() const {
    for (uint32_t slot = 0; slot < L::kStages; ++slot) {
      initialize_barrier(full(slot), 1);
      initialize_barrier(empty(slot), kGroups);
    }
    publish_barriers();
  }
};

// Loads the stages of all tiles. One thread.
template <ProductKind kind, bool single>
class Loader {
 public:
  using L = Layout<kind, single>;

  __device__ explicit Loader(const Shared<kind, single>& shared) : shared_(shared) {}

  template <int capacity>
  __device__ void run(const ProductTableOf<capacity>& table) {
    for_each_tile<kind>(table, [&](const Tile<kind>& tile) {
      const ProductEntry& product = tile.product;
      const bool has_B = !tile.is_diagonal();
      const TileMap& B = is_gram(kind) ? product.A : product.B;
      for (int k = tile.begin(); k < tile.end(); k += kBoxElements, position_.advance()) {
        const uint32_t slot = position_.slot();
        wait_for(shared_.empty(slot), position_.parity() ^ 1);
        arrive_and_expect(shared_.full(slot), (has_B ? 2 : 1) * L::kOperandBytes);
        load<across_A(kind)>(shared_.A(slot), product.A, tile.row, k, tile.plane());
        if (has_B) load<across_B(kind)>(shared_.B(slot), B, tile.column, k, tile.plane());
      }
    });
  }

 private:
  // 128 rows of 64 terms, or transposed, 64 rows of 128 columns.
  template <bool across>
  __device__ void load(uint32_t target, const TileMap& map, int first, int k, int matrix) const {
    const uint32_t full = shared_.full(position_.slot());
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const int place = first + box * kBoxRows;
        copy_box_of_part(target + (2 * part + box) * kBoxBytes, map, across ? place : k,
                         across ? k : place, matrix, part, full);
      }
    }
  }

  const Shared<kind, single>& shared_;
  Position<L::kStages> position_;
};

#endif

}  // namespace torchium::cuda_kernels::batched_product_detail
