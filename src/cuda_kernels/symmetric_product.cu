#include "cuda_kernels/pipeline.cuh"
#include "cuda_kernels/split_mma.cuh"
#include "cuda_kernels/symmetric_product.h"
#include "cuda_kernels/tile_map.h"
#include "cuda_kernels/tile_schedule.cuh"
#include "cuda_kernels/wgmma.cuh"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

// A cluster of two blocks takes two tiles at a time. In each block two warpgroups compute half of
// the rows each, one warp loads operands, and one for each warpgroup moves results.
constexpr int kTile = kProductTile;
constexpr int kBlocks = 2;
constexpr int kThreads = 384;
constexpr int kTileBytes = 2 * kBoxBytes;    // of an operand
constexpr int kStageBytes = 2 * kTileBytes;  // A and B
constexpr int kStages = 5;
// For each warpgroup: half of the rows of D and E, then of C, then half of the columns of the
// mirror image.
constexpr int kStagingBytes = 4 * kBoxBytes;
constexpr int kStagingAt = kStages * kStageBytes;
constexpr int kBarriersAt = kStagingAt + 2 * kStagingBytes;
constexpr int kBarriers = 2 * kStages + 4;
constexpr int kTasksAt = kBarriersAt + 8 * kBarriers;

// A tile of this block. Found beforehand: nobody waits for device memory between tiles.
struct Task {
  TilePosition tile;
  uint8_t state;
  static constexpr uint8_t kNone = 0;     // neither block of the cluster has work
  static constexpr uint8_t kOther = 1;    // only the other one
  static constexpr uint8_t kStarts = 2;   // the matrix starts at latest_start
  static constexpr uint8_t kStarted = 3;  // before

  __device__ bool is_mine() const { return state >= kStarts; }
};
constexpr int kMostTasks = 90;
constexpr int kSharedBytes = kTasksAt + kMostTasks * static_cast<int>(sizeof(Task)) + 1024;
static_assert(kSharedBytes <= 227 * 1024);

constexpr int kSumsOfTile = 8;

__host__ __device__ int product_sums_of(int order) {
  const int side = (order + kTile - 1) / kTile;
  return side * (side + 1) / 2 * kSumsOfTile;
}

struct TileMaps {
  TileMap A, B, C, D, E;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Where a ring of `slots` barriers stands.
template <int slots>
class Position {
 public:
  __device__ uint32_t slot() const { return slot_; }
  __device__ uint32_t previous_slot() const { return slot_ == 0 ? slots - 1 : slot_ - 1; }
  __device__ uint32_t parity() const { return parity_; }
  __device__ void advance() {
    slot_ = slot_ + 1 == slots ? 0 : slot_ + 1;
    if (slot_ == 0) parity_ ^= 1;
  }

 private:
  uint32_t slot_ = 0, parity_ = 0;
};

// What all roles know.
struct Block {
  const SymmetricProduct& args;
  uint32_t shared;
  Task* tasks;  // [kMostTasks]
  uint32_t rank;

  __device__ uint32_t stage(uint32_t slot) const { return shared + slot * kStageBytes; }
  __device__ uint32_t staging(int group) const {
    return shared + kStagingAt + group * kStagingBytes;
  }
  __device__ uint32_t barrier(int index) const { return shared + kBarriersAt + 8 * index; }
  // Operands are in the stage, or nobody in the cluster needs them any more.
  __device__ uint32_t full(uint32_t slot) const { return barrier(slot); }
  __device__ uint32_t empty(uint32_t slot) const { return barrier(kStages + slot); }
  // The staging area may be used by its warpgroup (and holds D and E), or by the warp that writes.
  __device__ uint32_t ready(int group) const { return barrier(2 * kStages + group); }
  __device__ uint32_t staged(int group) const { return barrier(2 * kStages + 2 + group); }

  __device__ void initialize() const {
    for (uint32_t slot = 0; slot < kStages; ++slot) {
      initialize_barrier(full(slot), 1);
      // Both warpgroups of both blocks: either block copies into the other's stages.
      initialize_barrier(empty(slot), 2 * kBlocks);
    }
    for (int group = 0; group < 2; ++group) {
      initialize_barrier(ready(group), 1);
      initialize_barrier(staged(group), 128);
    }
    publish_barriers();
  }

  __device__ bool is_active(int matrix) const {
    return matrix < args.matrices && args.starts[matrix] <= args.latest_start;
  }

  // All threads; seen after the next barrier.
  __device__ void find_tasks(int first_pair) const {
    const TileSchedule schedule(args.A.order, args.matrices);
    const int clusters = gridDim.x / kBlocks;
    for (int i = threadIdx.x; i < kMostTasks; i += kThreads) {
      const int pair = first_pair + blockIdx.x / kBlocks + i * clusters;
      Task task{{}, Task::kNone};
      if (pair < schedule.pairs()) {
        task.tile = schedule.tile(pair, rank);
        if (is_active(task.tile.matrix)) {
          const bool starts = args.starts[task.tile.matrix] == args.latest_start;
          task.state = starts ? Task::kStarts : Task::kStarted;
        } else if (is_active(schedule.tile(pair, rank ^ 1).matrix)) {
          task.state = Task::kOther;
        }
      }
      tasks[i] = task;
    }
  }

  // On the diagonal of a square both operands are the same tile.
  __device__ bool shares(const TilePosition& tile) const {
    return tile.row == tile.column && args.A.data == args.B.data;
  }

  // Boxes along k.
  __device__ int stages() const {
    return (args.A.order * (args.single ? 1 : 2) + kBoxHalves - 1) / kBoxHalves;
  }

  // body(task) for every task of this cluster with an active matrix.
  template <typename Body>
  __device__ void for_each_task(const Body& body) const {
    for (int i = 0; i < kMostTasks; ++i) {
      if (tasks[i].state != Task::kNone) body(tasks[i]);
    }
  }
};

// Loads A and B; one thread.
__device__ void load_operands(const Block& block, const TileMaps& maps) {
  Position<kStages> position;
  block.for_each_task([&](const Task& task) {
    const TilePosition tile = task.tile;
    const bool is_mine = task.is_mine();
    const bool has_B = !block.shares(tile);
    for (int index = 0; index < block.stages(); ++index, position.advance()) {
      const uint32_t target = block.stage(position.slot()), full = block.full(position.slot());
      wait_for(block.empty(position.slot()), position.parity() ^ 1);
      if (!is_mine) {
        arrive(full);
        continue;
      }
      arrive_and_expect(full, (has_B ? 2 : 1) * kTileBytes);
      const int x = index * kBoxHalves;
      for (uint32_t half = 0; half < 2; ++half) {
        const int y = tile.row + half * kBoxRows;
        const uint32_t a = target + half * kBoxBytes;
        if (!tile.shares_row) {
          copy_box(a, maps.A, x, y, tile.matrix, full);
        } else if (half == block.rank) {
          copy_box_to_all(a, maps.A, x, y, tile.matrix, full, (1 << kBlocks) - 1);
        }
        if (has_B) {
          copy_box(a + kTileBytes, maps.B, x, tile.column + half * kBoxRows, tile.matrix, full);
        }
      }
    }
  });
}

// Moves D and E to the staging area of a warpgroup, and C from there; one thread.
class Mover {
 public:
  __device__ Mover(const Block& block, const TileMaps& maps, int group)
      : block_(block), args_(block.args), maps_(maps), group_(group) {}

  // On the diagonal the part above it comes from the mirror image of the second half.
  __device__ void run() {
    block_.for_each_task([&](const Task& task) {
      if (!task.is_mine()) return;
      const TilePosition& tile = task.tile;
      const int row = tile.row + group_ * kBoxRows;
      const bool is_diagonal = tile.row == tile.column;
      load(tile, row);
      write(task, {row, tile.column, 1, is_diagonal && group_ == 0 ? kTile / 2 : kTile, 1});
      if (is_diagonal && group_ == 0) return;
      arrive(block_.ready(group_));
      write(task, {tile.column, row, is_diagonal ? 1 : 2, kTile / 2, 2});
    });
  }

 private:
  // Where the staged boxes go: `height` below each other, `width` columns. Boxes side by side are
  // `stride` boxes apart in the staging area.
  struct Part {
    int row, column, height, width, stride;
  };

  static __device__ int columns_of_box(bool single) { return single ? kBoxHalves : kBoxHalves / 2; }

  __device__ void load(const TilePosition& tile, int row) const {
    const uint32_t ready = block_.ready(group_);
    const bool has_D = args_.D.data != nullptr, has_E = args_.E.data != nullptr;
    const int boxes_of_D = has_D ? kTile / columns_of_box(args_.single_D) : 0;
    const int boxes_of_E = has_E ? kTile / kBoxHalves : 0;
    arrive_and_expect(ready, (boxes_of_D + boxes_of_E) * kBoxBytes);
    const int left = args_.single_D ? tile.column : 2 * tile.column;
    for (int i = 0; i < boxes_of_D; ++i) {
      copy_box(box(i), maps_.D, left + i * kBoxHalves, row, tile.matrix, ready);
    }
    for (int i = 0; i < boxes_of_E; ++i) {
      copy_box(box(2 + i), maps_.E, tile.column + i * kBoxHalves, row, tile.matrix, ready);
    }
  }

  __device__ void write(const Task& task, const Part& part) {
    wait_for(block_.staged(group_), parity_);
    parity_ ^= 1;
    const int z = task.tile.matrix;
    const int left = args_.single_C ? part.column : 2 * part.column;
    for (int i = 0; i < part.width / columns_of_box(args_.single_C); ++i) {
      for (int j = 0; j < part.height; ++j) {
        const int x = left + i * kBoxHalves, y = part.row + j * kBoxRows;
        const uint32_t source = box(i * part.stride + j);
        write_box(source, maps_.C, x, y, z);
      }
    }
    wait_for_writes();
  }

  __device__ uint32_t box(int index) const { return block_.staging(group_) + index * kBoxBytes; }

  const Block& block_;
  const SymmetricProduct& args_;
  const TileMaps& maps_;
  const int group_;
  uint32_t parity_ = 0;
};

// One of the two warpgroups that compute.
template <bool single>
class Consumer {
 public:
  __device__ explicit Consumer(const Block& block)
      : block_(block),
        args_(block.args),
        group_(threadIdx.x / 128 - 1),
        thread_(threadIdx.x % 128),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ void run() {
    block_.for_each_task([&](const Task& task) {
      if (!task.is_mine()) {
        skip();
        return;
      }
      const float4 coefficients = coefficients_of(task);  // on its way during the product
      float x[64];
      accumulate(block_.shares(task.tile), x);
      wait_until_ready();
      finish(task.tile, coefficients, x);
      if (args_.squares != nullptr) add_squares(task.tile, x);
      store(task.tile, x);
    });
  }

 private:
  // Takes part in the stages of the other block.
  __device__ void skip() {
    for (int index = 0; index < block_.stages(); ++index, position_.advance()) {
      wait_for(block_.full(position_.slot()), position_.parity());
      release(position_.slot());
    }
  }

  // Nobody in this warpgroup reads the stage any more.
  __device__ void release(uint32_t slot) const {
    if (thread_ < kBlocks) arrive_at(block_.empty(slot), thread_);
  }

  // sum = A B of this tile. B is symmetric: its rows serve as columns.
  __device__ void accumulate(bool shares, float (&sum)[64]) {
    float main[64], cross[64];
    const int stages = block_.stages();
    const int per_sum = single ? stages : args_.terms_per_sum / kSplitPadding;
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = 0;
      // The wait at the end of each sum is unconditional: else the compiler, which must know that
      // no product is under way where registers are read, serialises all of them.
#pragma unroll 1
    for (int index = 0; index < stages;) {
      const int end = min(stages, index + per_sum);
      int is_later = 0;
#pragma unroll 1
      do {
        const uint32_t slot = position_.slot(), previous = position_.previous_slot();
        wait_for(block_.full(slot), position_.parity());
        position_.advance();
        multiply(slot, shares, is_later, index > 0, main, cross);
        wgmma_wait<1>();
        if (is_later) release(previous);
        is_later = 1;
      } while (++index < end);
      wgmma_wait<0>();
      release(position_.previous_slot());
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] += main[i];
    }
    if (!single) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] = fmaf(cross[i], 1.0f / kLowScale, sum[i]);
    }
  }

  // A box has 64 halves along k: 32 hi and their lo, or for a single product 64 terms.
  __device__ void multiply(uint32_t slot, bool shares, int add_main, int add_cross,
                           float (&main)[64], float (&cross)[64]) const {
    const uint32_t A = block_.stage(slot) + group_ * kBoxBytes;
    const uint32_t B = block_.stage(slot) + (shares ? 0 : kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBoxHalves; k += 32) {  // bytes
      const uint64_t a_first = tile_descriptor(A + k);
      const uint64_t a_second = tile_descriptor(A + kBoxHalves + k);
      const uint64_t b_first = tile_descriptor(B + k);
      const uint64_t b_second = tile_descriptor(B + kBoxHalves + k);
      wgmma_64x128x16(main, a_first, b_first, k > 0 || add_main);
      if (single) {
        wgmma_64x128x16(main, a_second, b_second, 1);
      } else {
        wgmma_64x128x16(cross, a_first, b_second, k > 0 || add_cross);
        wgmma_64x128x16(cross, a_second, b_first, 1);
      }
    }
    wgmma_commit();
  }

  // One sum a warp of each tile; a tile below the diagonal counts twice.
  __device__ void add_squares(const TilePosition& tile, const float (&x)[64]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) sum = fmaf(x[i], x[i], sum);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, offset);
    }
    if (lane_ != 0) return;
    const int row = tile.row / kTile;
    const int index =
        (row * (row + 1) / 2 + tile.column / kTile) * kSumsOfTile + 4 * group_ + warp_;
    const int64_t first = int64_t{tile.matrix} * product_sums_of(args_.A.order);
    args_.squares[first + index] = tile.row == tile.column ? sum : 2 * sum;
  }

  __device__ float4 coefficients_of(const Task& task) const {
    if (args_.coefficients != nullptr) {
      return reinterpret_cast<const float4*>(args_.coefficients)[task.tile.matrix];
    }
    return {0, task.state == Task::kStarts ? args_.latest_factor : 1, 1, 0};
  }

  __device__ void wait_until_ready() {
    wait_for(block_.ready(group_), ready_parity_);
    ready_parity_ ^= 1;
  }

  // From the product to the elements of C. x[4 j + 2 h + e] is in row 16 warp + lane / 4 + 8 h and
  // column 8 j + lane % 4 * 2 + e of this half of the tile.
  __device__ void finish(const TilePosition& tile, const float4& c, float (&x)[64]) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] *= c.y;
    if (args_.D.data != nullptr) add_staged(args_.single_D, 0, c.z, x);
    if (args_.E.data != nullptr) add_staged(true, 2 * kBoxBytes, c.w, x);
    if (tile.row == tile.column) add_to_diagonal(args_.n - tile.row, c.x, x);
  }

  __device__ void add_to_diagonal(int rows, float a, float (&x)[64]) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int row = group_ * kBoxRows + 16 * warp_ + lane_ / 4 + i / 2 % 2 * 8;
      if (row == i / 4 * 8 + lane_ % 4 * 2 + i % 2 && row < rows) x[i] += a;
    }
  }

  // Two 8 x 8 parts below each other, and two to the right of them: what this lane passes to
  // ldmatrix and stmatrix for the columns from 8 j.
  __device__ uint32_t staged_at(int j, bool is_single) const {
    const int row = 16 * warp_ + lane_ % 16;
    const int column = 8 * j + lane_ / 16 * 8;
    return piece(is_single ? column / 64 : column / 32, row, is_single ? column % 64 : column % 32);
  }

  // The same parts, transposed.
  __device__ uint32_t mirrored_at(int j, bool is_single) const {
    const int row = 8 * j + lane_ / 16 * 8 + lane_ % 8;
    const int column = 16 * warp_ + lane_ / 8 % 2 * 8;
    return piece((is_single ? 0 : column / 32 * 2) + row / kBoxRows, row % kBoxRows,
                 is_single ? column : column % 32);
  }

  __device__ uint32_t piece(int box, int row, int column) const {
    return block_.staging(group_) + box * kBoxBytes + row * 128 + ((column / 8) ^ (row % 8)) * 16;
  }

  // lo is 64 bytes behind hi, whatever the permutation.
  static __device__ uint32_t low(uint32_t address) { return address ^ 64; }

  __device__ void add_staged(bool is_single, int offset, float factor, float (&x)[64]) const {
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      uint32_t hi[4], lo[4]{};
      const uint32_t address = staged_at(j, is_single) + offset;
      load_matrices(hi, address);
      if (!is_single) load_matrices(lo, low(address));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 d = join_pair(hi[i], lo[i]);
        x[4 * j + 2 * i] = fmaf(factor, d.x, x[4 * j + 2 * i]);
        x[4 * j + 2 * i + 1] = fmaf(factor, d.y, x[4 * j + 2 * i + 1]);
      }
    }
  }

  // Through shared memory to C, and mirrored.
  __device__ void store(const TilePosition& tile, const float (&x)[64]) {
    uint32_t hi[32], lo[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) split_pair(x[2 * i], x[2 * i + 1], hi[i], lo[i]);
    const bool is_diagonal = tile.row == tile.column;
    if (is_diagonal && group_ == 0) symmetrise<0>(hi, lo);
    if (is_diagonal && group_ == 1) symmetrise<1>(hi, lo);
    stage<false>(hi, lo);
    if (is_diagonal && group_ == 0) return;
    wait_until_ready();
    stage<true>(hi, lo);
  }

  // Makes the square on the diagonal its lower triangle and the mirror image of that. What a
  // product has below the diagonal and above it differs by rounding, which the iteration amplifies.
  template <int group>
  __device__ void symmetrise(uint32_t (&hi)[32], uint32_t (&lo)[32]) const {
    constexpr int kFirst = 8 * group, kEnd = kFirst + 8;  // columns 8 j
#pragma unroll
    for (int j = kFirst; j < kEnd; j += 2) {
      store_matrices<false>(staged_at(j, false), hi + 2 * j);
      store_matrices<false>(low(staged_at(j, false)), lo + 2 * j);
    }
    warpgroup_sync(1 + group);
#pragma unroll
    for (int j = kFirst; j < kEnd; j += 2) {
      const int row = 8 * (j - kFirst) + lane_ / 16 * 8 + lane_ % 8;
      const int column = group * kBoxRows + 16 * warp_ + lane_ / 8 % 2 * 8;
      const uint32_t address = piece(column / 32, row, column % 32);
      uint32_t mirrored_hi[4], mirrored_lo[4];
      load_transposed_matrices(mirrored_hi, address);
      load_transposed_matrices(mirrored_lo, low(address));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int above =
            8 * (j - kFirst) + i / 2 * 8 + lane_ % 4 * 2 - (16 * warp_ + i % 2 * 8 + lane_ / 4);
        hi[2 * j + i] = choose(above, hi[2 * j + i], mirrored_hi[i]);
        lo[2 * j + i] = choose(above, lo[2 * j + i], mirrored_lo[i]);
      }
    }
    warpgroup_sync(1 + group);
  }

  // Of two neighbours those above the diagonal from the mirror image: the first is `above` columns
  // right of it.
  static __device__ uint32_t choose(int above, uint32_t own, uint32_t mirrored) {
    if (above > 0) return mirrored;
    return above == 0 ? __byte_perm(own, mirrored, 0x7610) : own;
  }

  template <bool is_mirrored>
  __device__ void stage(const uint32_t (&hi)[32], const uint32_t (&lo)[32]) const {
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      const uint32_t address =
          is_mirrored ? mirrored_at(j, args_.single_C) : staged_at(j, args_.single_C);
      store_matrices<is_mirrored>(address, hi + 2 * j);
      if (!args_.single_C) store_matrices<is_mirrored>(low(address), lo + 2 * j);
    }
    publish_shared();
    arrive(block_.staged(group_));
  }

  const Block& block_;
  const SymmetricProduct& args_;
  const int group_, thread_, warp_, lane_;
  Position<kStages> position_;
  uint32_t ready_parity_ = 0;
};
#endif

template <bool single>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    symmetric_product_kernel(const __grid_constant__ SymmetricProduct arguments,
                             const __grid_constant__ TileMaps maps, int first_pair) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  const uint32_t start = shared_address(shared);
  const uint32_t padding = (1024 - start % 1024) % 1024;
  const Block block{arguments, start + padding,
                    reinterpret_cast<Task*>(shared + padding + kTasksAt), rank_in_cluster()};
  if (threadIdx.x == 0) block.initialize();
  block.find_tasks(first_pair);
  cluster_sync();
  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x == 0) load_operands(block, maps);
    if (threadIdx.x == 32) Mover(block, maps, 0).run();
    if (threadIdx.x == 64) Mover(block, maps, 1).run();
  } else {
    take_registers<240>();
    Consumer<single>(block).run();
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here
#endif
}

cudaError_t make_tile_maps(const SymmetricProduct& arguments, TileMaps& maps) {
  struct Source {
    const SplitMatrices& matrices;
    bool single;
    TileMap& map;
  };
  for (const Source& source :
       {Source{arguments.A, arguments.single, maps.A},
        Source{arguments.B, arguments.single, maps.B},
        Source{arguments.C, arguments.single_C, maps.C},
        Source{arguments.D, arguments.single_D, maps.D}, Source{arguments.E, true, maps.E}}) {
    if (source.matrices.data == nullptr) continue;
    const cudaError_t error =
        make_tile_map(source.matrices, arguments.matrices, source.single, source.map);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <bool single>
cudaError_t launch(const SymmetricProduct& arguments, cudaStream_t stream) {
  TileMaps maps{};
  cudaError_t error = make_tile_maps(arguments, maps);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(symmetric_product_kernel<single>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  int device = 0, processors = 0;
  error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const TileSchedule schedule(arguments.A.order, arguments.matrices);
  const int clusters = std::min(processors / kBlocks, schedule.pairs());
  for (int pair = 0; pair < schedule.pairs(); pair += clusters * kMostTasks) {
    symmetric_product_kernel<single>
        <<<clusters * kBlocks, kThreads, kSharedBytes, stream>>>(arguments, maps, pair);
  }
  return cudaGetLastError();
}

}  // namespace

int product_sums(int order) { return product_sums_of(order); }

bool has_symmetric_product(int major, int minor, int shared_bytes) {
#ifdef TORCHIUM_HAS_SM90A
  return major == 9 && minor == 0 && shared_bytes >= kSharedBytes;
#else
  return false;
#endif
}

cudaError_t symmetric_product(const SymmetricProduct& arguments, cudaStream_t stream) {
  if (arguments.matrices == 0) return cudaSuccess;
  return arguments.single ? launch<true>(arguments, stream) : launch<false>(arguments, stream);
}

}  // namespace torchium::cuda_kernels
