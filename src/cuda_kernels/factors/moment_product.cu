#include "cuda_kernels/common/pipeline.cuh"
#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/common/wgmma.cuh"
#include "cuda_kernels/factors/moment_product.h"
#include "cuda_kernels/split_gemm/tile_map.h"

#include <algorithm>
#include <limits>

namespace torchium::cuda_kernels {
namespace {

// A cluster of two blocks computes a tile, each block half of its rows. Two warpgroups compute, and
// one thread loads.
constexpr int kBlocks = 2;
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
// Fewer stages per cluster take longer to add up than they save.
constexpr int kLeastShare = 16;
static_assert(kSharedBytes <= 227 * 1024 && kTerms == kBoxRows && kTile == 4 * kBoxElements);

struct Operand {
  TileMap map;
  MomentParts parts;
  float* workspace;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Stages [begin, end) of a tile.
struct Segment {
  int tile, row, column, begin, end;

  __device__ bool is_diagonal() const { return row == column; }
};

// body(segment) for every segment of this block's cluster.
template <typename Body>
__device__ void for_each_segment(const MomentParts& parts, const Body& body) {
  const int cluster = static_cast<int>(blockIdx.x) / kBlocks;
  const int last = min(parts.tiles * parts.stages, (cluster + 1) * parts.share);
  for (int stage = cluster * parts.share; stage < last;) {
    const int tile = stage / parts.stages, first = tile * parts.stages;
    const int end = min(last, first + parts.stages);
    const TriangleTile place(tile);
    body(Segment{tile, place.row * kTile, place.column * kTile, stage - first, end - first});
    stage = end;
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
  for_each_segment(operand.parts, [&](const Segment& segment) {
    const bool has_rows = !segment.is_diagonal();
    for (int stage = segment.begin; stage < segment.end; ++stage, position.advance()) {
      const uint32_t slot = position.slot(), full = shared.full(slot);
      wait_for(shared.empty(slot), position.parity() ^ 1);
      arrive_and_expect(full, (has_rows ? kRowBytes : 0) + kColumnBytes);
#pragma unroll
      for (uint32_t box = 0; box < 2; ++box) {
        const uint32_t place = 2 * shared.rank + box;
        const int offset = static_cast<int>(place) * kBoxElements, first = stage * kTerms;
        copy_box_to_all(shared.columns(slot) + place * kBoxBytes, operand.map,
                        segment.column + offset, first, 0, full, kAllBlocks);
        if (has_rows) {
          copy_box(shared.rows(slot) + box * kBoxBytes, operand.map, segment.row + offset, first, 0,
                   full);
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
    for_each_segment(operand.parts, [&](const Segment& segment) {
      float sum[128];
      accumulate(segment, sum);
      const int64_t part = segment.tile + blockIdx.x / kBlocks;  // as MomentParts says
      store(operand.workspace + part * kTile * kTile, sum);
    });
  }

 private:
  __device__ void release(uint32_t slot) const {
    if (thread_ < kBlocks) arrive_at(shared_.empty(slot), thread_);
  }

  __device__ void accumulate(const Segment& segment, float (&sum)[128]) {
    const bool is_diagonal = segment.is_diagonal();
    int is_later = 0;
    // The wait at the end must be unconditional: otherwise the compiler cannot prove that no
    // product is in flight when registers are read, and serialises all products.
#pragma unroll 1
    for (int stage = segment.begin; stage < segment.end; ++stage) {
      const uint32_t slot = position_.slot(), previous = position_.previous_slot();
      wait_for(shared_.full(slot), position_.parity());
      position_.advance();
      const uint32_t columns = shared_.columns(slot);
      const uint32_t own =
          is_diagonal ? columns + 2 * shared_.rank * kBoxBytes : shared_.rows(slot);
      const uint32_t rows = own + group_ * kBoxBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTerms; k += 16) {  // rows of 128 bytes
        wgmma_64x256x16<Element, true, true>(sum, tile_descriptor<true>(rows + k * 128),
                                             tile_descriptor<true>(columns + k * 128),
                                             k > 0 || is_later);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (is_later) release(previous);
      is_later = 1;
    }
    wgmma_wait<0>();
    release(position_.previous_slot());
  }

  __device__ void store(float* part, const float (&sum)[128]) const {
    const int warp = thread_ / 32, lane = thread_ % 32;
    const int first = static_cast<int>(shared_.rank) * kTile / kBlocks + group_ * 64 + 16 * warp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* row = part + (first + lane / 4 + 8 * h) * kTile + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
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
  const auto start = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const Shared shared{start + (1024 - start % 1024) % 1024, rank_in_cluster()};
  if (threadIdx.x == 0) shared.initialize();
  cluster_sync();
  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x == 0) load_stages(operand, shared);
  } else {
    take_registers<240>();
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

int64_t stages_of(int64_t count) { return (count + kTerms - 1) / kTerms; }

}  // namespace

bool has_moment_product(int major, int minor, int shared_bytes) {
#ifdef TORCHIUM_HAS_SM90A
  return major == 9 && minor == 0 && shared_bytes >= kSharedBytes;
#else
  return false;
#endif
}

bool fits_moment_product(const MomentProduct& product) {
  const int64_t n = product.n;
  const int64_t tiles = triangle_tiles((product.n + kTile - 1) / kTile);
  const bool saves_work = 10 * tiles * kTile * kTile <= 9 * n * n;
  return saves_work && product.count > 0 &&
         tiles * stages_of(product.count) <= std::numeric_limits<int>::max() / 2;
}

cudaError_t plan_moment_product(const MomentProduct& product, MomentParts& parts) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  if (error != cudaSuccess) return error;
  parts.tiles = triangle_tiles((product.n + kTile - 1) / kTile);
  parts.stages = static_cast<int>(stages_of(product.count));
  const int all = parts.tiles * parts.stages, clusters = processors / kBlocks;
  parts.share = std::max(kLeastShare, (all + clusters - 1) / clusters);
  parts.clusters = (all + parts.share - 1) / parts.share;
  return cudaSuccess;
}

cudaError_t moment_product(const MomentProduct& product, const MomentParts& parts, float* workspace,
                           cudaStream_t stream) {
  Operand operand{};
  operand.parts = parts;
  operand.workspace = workspace;
  const cudaError_t error =
      make_tile_map(product.X, product.count, product.n, product.pitch, operand.map);
  if (error != cudaSuccess) return error;
  return product.is_bfloat16 ? launch<__nv_bfloat16>(operand, stream)
                             : launch<__half>(operand, stream);
}

}  // namespace torchium::cuda_kernels
