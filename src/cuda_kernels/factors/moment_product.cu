#include "cuda_kernels/common/hopper.h"
#include "cuda_kernels/common/pipeline.cuh"
#include "cuda_kernels/common/shared_address.cuh"
#include "cuda_kernels/common/wgmma.cuh"
#include "cuda_kernels/factors/moment_parts.cuh"
#include "cuda_kernels/factors/moment_plan.h"
#include "cuda_kernels/split_gemm/tile_map.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

// A cluster of two blocks computes a tile, each block half of its rows. Two warpgroups compute, and
// one thread loads.
constexpr int kBlocks = MomentParts::kBlocks;
constexpr int kThreads = 384;
constexpr int kStages = 4;
constexpr int kRowBytes = 2 * kBoxBytes;     // of the rows of a block
constexpr int kColumnBytes = 4 * kBoxBytes;  // of the columns of the tile, of which each block
                                             // loads half for both
constexpr int kStageBytes = kRowBytes + kColumnBytes;
constexpr int kBarriersAt = kStages * kStageBytes;
constexpr int kSharedBytes = kBarriersAt + 2 * 8 * kStages + 1024;
constexpr int kTile = MomentParts::kTile;
constexpr int kTerms = MomentParts::kTerms;
static_assert(kSharedBytes <= 227 * 1024 && kTerms == kBoxRows && kTile == 4 * kBoxElements);

constexpr int kBoxes = kTile / kBoxElements;  // of the rows and of the columns of a tile

using View = MomentProduct::View;

// The boxes that cover a view.
struct Grid {
  int columns, rows;           // of boxes
  int width, height, samples;  // of the images, from box to box
};

struct Operand {
  TileMap maps[MomentProduct::kMostViews];
  Grid grids[MomentProduct::kMostViews];
  MomentProduct::Factors products[MomentProduct::kMostProducts];
  Shift shift[MomentProduct::kMostShifts];
  MomentParts parts;
  int count;  // of products
  int shifts, boxes_per_shift;
  float* workspace;
};
static_assert(sizeof(Operand) <= 4096);  // kernel arguments

// Box `box` of the vectors whose shifts begin at `first`.
struct BoxPlace {
  int channel, x, y;

  __device__ BoxPlace(const Operand& operand, int first, int box) {
    const int index = box / operand.boxes_per_shift;
    const Shift shift = operand.shift[first + min(index, operand.shifts - 1)];
    // After the last shift: past the last channel.
    const int place =
        index < operand.shifts ? box % operand.boxes_per_shift : operand.boxes_per_shift;
    channel = place * kBoxElements;
    x = shift.x;
    y = shift.y;
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Stages [begin, end) of a tile.
struct Segment {
  int product, tile, row, column, begin, end;  // row and column count boxes
  bool is_diagonal;                            // both have the same boxes
};

// body(segment) for every segment of this block's cluster.
template <typename Body>
__device__ void for_each_segment(const Operand& operand, const Body& body) {
  const MomentParts& parts = operand.parts;
  const int cluster = static_cast<int>(blockIdx.x) / kBlocks;
  const int last = min(parts.units, (cluster + 1) * parts.share);
  int product = 0;
  for (int unit = cluster * parts.share; unit < last;) {
    while (product + 1 < operand.count && unit >= parts.series[product + 1].first_unit) ++product;
    const TileSeries& series = parts.series[product];
    const MomentTile tile = moment_tile_at(series, unit);
    const int begin = pieces_of(unit - tile.unit, tile.units);
    const int end = min(series.stages, pieces_of(last - tile.unit, tile.units));
    if (begin < end) {
      body(Segment{product, series.first_tile + tile.index, tile.row * kBoxes, tile.column * kBoxes,
                   begin, end, series.is_triangular && tile.row == tile.column});
    }
    unit = tile.unit + end * tile.units;
  }
}

struct Shared {
  uint32_t start, rank;

  __device__ uint32_t rows(uint32_t slot) const { return start + slot * kStageBytes; }
  __device__ uint32_t columns(uint32_t slot) const { return rows(slot) + kRowBytes; }
  // full: operands are in the stage. empty: both blocks are done with it.
  __device__ uint32_t full(uint32_t slot) const { return start + kBarriersAt + 8 * slot; }
  __device__ uint32_t empty(uint32_t slot) const { return full(kStages + slot); }

  __device__ void initialize() const {
    for (uint32_t slot = 0; slot < kStages; ++slot) {
      initialize_barrier(full(slot), 1);
      initialize_barrier(empty(slot), 2 * kBlocks);
    }
    publish_barriers();
  }
};

// One thread.
__device__ void load_stages(const Operand& operand, const Shared& shared) {
  constexpr uint16_t kAllBlocks = (1 << kBlocks) - 1;
  Position<kStages> position;
  for_each_segment(operand, [&](const Segment& segment) {
    const MomentProduct::Factors& product = operand.products[segment.product];
    const TileMap& map = operand.maps[product.view];
    const Grid& grid = operand.grids[product.view];
    const bool has_rows = !segment.is_diagonal;
    const uint32_t first = 2 * shared.rank;
    const auto box = static_cast<int>(first);
    const BoxPlace rows[2] = {{operand, product.rows, segment.row + box},
                              {operand, product.rows, segment.row + box + 1}};
    const BoxPlace columns[2] = {{operand, product.columns, segment.column + box},
                                 {operand, product.columns, segment.column + box + 1}};
#pragma unroll 1
    for (int stage = segment.begin; stage < segment.end; ++stage, position.advance()) {
      const int line = stage / grid.columns;
      const int x = (stage - line * grid.columns) * grid.width;
      const int y = line % grid.rows * grid.height, sample = line / grid.rows * grid.samples;
      const uint32_t slot = position.slot(), full = shared.full(slot);
      wait_for(shared.empty(slot), position.parity() ^ 1);
      arrive_and_expect(full, (has_rows ? kRowBytes : 0) + kColumnBytes);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        copy_box_of_part_to_all(shared.columns(slot) + (first + i) * kBoxBytes, map,
                                columns[i].channel, x + columns[i].x, y + columns[i].y, sample,
                                full, kAllBlocks);
        if (has_rows) {
          copy_box_of_part(shared.rows(slot) + i * kBoxBytes, map, rows[i].channel, x + rows[i].x,
                           y + rows[i].y, sample, full);
        }
      }
    }
  });
}

// One of the two warpgroups that compute, 64 rows each.
template <typename Element>
class Consumer {
 public:
  __device__ explicit Consumer(const Shared& shared)
      : shared_(shared), group_(threadIdx.x / 128 - 1), thread_(threadIdx.x % 128) {}

  __device__ void run(const Operand& operand) {
    for_each_segment(operand, [&](const Segment& segment) {
      const int64_t part = segment.tile + blockIdx.x / kBlocks;  // as MomentParts says
      float* target = operand.workspace + part * kTile * kTile;
      // On the diagonal the first half of the rows needs only the first half of the columns, and
      // each block has a quarter of the rows in either half.
      const int rank = static_cast<int>(shared_.rank);
      if (!segment.is_diagonal) {
        compute<kTile>(segment, 2 * rank + group_, target);
      } else if (group_ == 0) {
        compute<kTile / 2>(segment, rank, target);
      } else {
        compute<kTile>(segment, 3 - rank, target);
      }
    });
  }

 private:
  // The first `width` columns of 64 rows of a tile.
  template <int width>
  __device__ void compute(const Segment& segment, int rows, float* target) {
    float sum[width / 2];
    accumulate<width>(segment, rows, sum);
    store<width>(target + rows * 64 * kTile, sum);
  }

  __device__ void release(uint32_t slot) const {
    if (thread_ < kBlocks) arrive_at(shared_.empty(slot), thread_);
  }

  template <int width>
  __device__ void accumulate(const Segment& segment, int row_box, float (&sum)[width / 2]) {
    const bool is_diagonal = segment.is_diagonal;
    int is_later = 0;
    // The wait at the end must be unconditional: otherwise the compiler cannot prove that no
    // product is in flight when registers are read, and serialises all products.
#pragma unroll 1
    for (int stage = segment.begin; stage < segment.end; ++stage) {
      const uint32_t slot = position_.slot(), previous = position_.previous_slot();
      wait_for(shared_.full(slot), position_.parity());
      position_.advance();
      const uint32_t columns = shared_.columns(slot);
      const uint32_t rows =
          is_diagonal ? columns + row_box * kBoxBytes : shared_.rows(slot) + group_ * kBoxBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTerms; k += 16) {  // rows of 128 bytes
        const uint64_t A = tile_descriptor<true>(rows + k * 128);
        const uint64_t B = tile_descriptor<true>(columns + k * 128);
        if constexpr (width == kTile) {
          wgmma_64x256x16<true, true, Element>(sum, A, B, k > 0 || is_later);
        } else {
          wgmma_64x128x16<true, true, Element>(sum, A, B, k > 0 || is_later);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (is_later) release(previous);
      is_later = 1;
    }
    wgmma_wait<0>();
    release(position_.previous_slot());
  }

  template <int width>
  __device__ void store(float* rows, const float (&sum)[width / 2]) const {
    const int warp = thread_ / 32, lane = thread_ % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* row = rows + (16 * warp + lane / 4 + 8 * h) * kTile + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < width / 8; ++j) {
        *reinterpret_cast<float2*>(row + 8 * j) = {sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]};
      }
    }
  }

  const Shared& shared_;
  const int group_, thread_;
  Position<kStages> position_;
};

#define TORCHIUM_CLUSTER __cluster_dims__(kBlocks, 1, 1)
#else
#define TORCHIUM_CLUSTER  // compilers for earlier architectures do not support the attribute
#endif

template <typename Element>
__global__ void TORCHIUM_CLUSTER __launch_bounds__(kThreads, 1)
    moment_product_kernel(const __grid_constant__ Operand operand) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  const uint32_t start = shared_address(memory);
  const Shared shared{start + (1024 - start % 1024) % 1024, rank_in_cluster()};
  if (threadIdx.x == 0) shared.initialize();
  cluster_sync();
  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x == 0) load_stages(operand, shared);
  } else {
    take_registers<232>();
    Consumer<Element>(shared).run(operand);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here
#endif
}

template <typename Element>
cudaError_t launch(const Operand& operand, cudaStream_t stream) {
  const auto kernel = moment_product_kernel<Element>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<kBlocks * operand.parts.clusters, kThreads, kSharedBytes, stream>>>(operand);
  return cudaGetLastError();
}

}  // namespace

bool has_moment_product(int major, int minor, int shared_bytes) {
  return has_hopper_kernel(major, minor, shared_bytes, kSharedBytes);
}

cudaError_t moment_product(const MomentProduct& product, const MomentParts& parts, float* workspace,
                           cudaStream_t stream) {
  Operand operand{};
  operand.parts = parts;
  operand.workspace = workspace;
  operand.count = product.products;
  operand.shifts = product.shifts;
  operand.boxes_per_shift = static_cast<int>(moment_boxes_per_shift(product));
  std::copy_n(product.product, product.products, operand.products);
  std::copy_n(product.shift, MomentProduct::kMostShifts, operand.shift);
  const Images& images = product.images;
  for (int i = 0; i < product.views; ++i) {
    const View& view = product.view[i];
    BoxOfPixels box = moment_box(view, images.samples);
    box.stride_x = product.stride.x;
    box.stride_y = product.stride.y;
    operand.grids[i] = {static_cast<int>(pieces_of<int64_t>(view.width, box.width)),
                        static_cast<int>(pieces_of<int64_t>(view.height, box.height)),
                        box.width * box.stride_x, box.height * box.stride_y, box.samples};
    const cudaError_t error =
        make_tile_map({images.data, images.samples, images.height, images.width, images.channels,
                       images.sample_pitch, images.row_pitch, images.pixel_pitch},
                      box, operand.maps[i]);
    if (error != cudaSuccess) return error;
  }
  return images.is_bfloat16 ? launch<__nv_bfloat16>(operand, stream)
                            : launch<__half>(operand, stream);
}

}  // namespace torchium::cuda_kernels
