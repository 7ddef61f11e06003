// Shared by all warps of a block that computes symmetric products: the layout of shared memory,
// its barriers, and the tiles of the block.
#pragma once

#include "cuda_kernels/common/pipeline.cuh"
#include "cuda_kernels/common/tile_schedule.cuh"
#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/split_gemm/symmetric_product.h"
#include "cuda_kernels/split_gemm/tile_map.h"

#include <cstdint>

namespace torchium::cuda_kernels::symmetric_product_detail {

// A cluster of two blocks processes two tiles at a time. In each block two warpgroups compute half
// of the rows each, one warp loads operands, and one warp per warpgroup moves results.
constexpr int kTile = kProductTile;
constexpr int kBlocks = 2;
constexpr int kThreads = 384;
constexpr int kTileBytes = 2 * kBoxBytes;    // of an operand
constexpr int kStageBytes = 2 * kTileBytes;  // A and B
constexpr int kStages = 5;
// Per warpgroup: half of the rows of D and E, then of C, then half of the columns of the mirror
// image.
constexpr int kStagingBytes = 4 * kBoxBytes;
constexpr int kStagingAt = kStages * kStageBytes;
constexpr int kBarriersAt = kStagingAt + 2 * kStagingBytes;
constexpr int kBarriers = 2 * kStages + 4;
constexpr int kTasksAt = kBarriersAt + 8 * kBarriers;

// A tile of this block. Read ahead, so that no warp waits for device memory between tiles.
struct Task {
  TilePosition tile;
  uint8_t state;
  static constexpr uint8_t kNone = 0;     // neither block of the cluster has work
  static constexpr uint8_t kOther = 1;    // only the other block has
  static constexpr uint8_t kStarts = 2;   // the matrix starts at latest_start
  static constexpr uint8_t kStarted = 3;  // before

  __device__ bool is_mine() const { return state >= kStarts; }
};
constexpr int kMostTasks = 90;
static_assert(kMostTasks <= kThreads);
constexpr int kSharedBytes = kTasksAt + kMostTasks * static_cast<int>(sizeof(Task)) + 1024;
static_assert(kSharedBytes <= 227 * 1024);

constexpr int kSumsOfTile = 8;

__host__ __device__ inline int product_sums_of(int order) {
  return triangle_tiles((order + kTile - 1) / kTile) * kSumsOfTile;
}

struct TileMaps {
  TileMap A, B, C, D, E, first_B;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Shared by all roles.
struct Block {
  const SymmetricProduct& args;
  uint32_t shared;
  Task* tasks;  // [count]
  int count;
  uint32_t rank;

  __device__ uint32_t stage(uint32_t slot) const { return shared + slot * kStageBytes; }
  __device__ uint32_t staging(int group) const {
    return shared + kStagingAt + group * kStagingBytes;
  }
  __device__ uint32_t barrier(int index) const { return shared + kBarriersAt + 8 * index; }
  // full: operands are in the stage. empty: all blocks of the cluster are done with them.
  __device__ uint32_t full(uint32_t slot) const { return barrier(slot); }
  __device__ uint32_t empty(uint32_t slot) const { return barrier(kStages + slot); }
  // ready: the warpgroup may use the staging area (which holds D and E). staged: the mover warp may
  // write it out.
  __device__ uint32_t ready(int group) const { return barrier(2 * kStages + group); }
  __device__ uint32_t staged(int group) const { return barrier(2 * kStages + 2 + group); }

  __device__ void initialize() const {
    for (uint32_t slot = 0; slot < kStages; ++slot) {
      initialize_barrier(full(slot), 1);
      // Both warpgroups of both blocks: each block copies into the other's stages.
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

  // The tile of this thread's task, if it has one. Returns the matrix of the other block's tile.
  __device__ int place_tile(int first_pair) const {
    if (static_cast<int>(threadIdx.x) >= count) return 0;
    const TileSchedule schedule(args.A.order, args.matrices);
    const int pair = first_pair + (blockIdx.x + threadIdx.x * gridDim.x) / kBlocks;
    tasks[threadIdx.x].tile = schedule.tile(pair, rank);
    return schedule.tile(pair, rank ^ 1).matrix;
  }

  // Called by all threads once `starts` is known; visible after the next barrier.
  __device__ void set_state(int others_matrix) const {
    if (static_cast<int>(threadIdx.x) >= count) return;
    Task& task = tasks[threadIdx.x];
    if (is_active(task.tile.matrix)) {
      const bool starts = args.starts[task.tile.matrix] == args.latest_start;
      task.state = starts ? Task::kStarts : Task::kStarted;
    } else {
      task.state = is_active(others_matrix) ? Task::kOther : Task::kNone;
    }
  }

  // On the diagonal both operands are the same tile.
  __device__ bool shares(const TilePosition& tile) const {
    return tile.row == tile.column && args.A.data == args.B.data;
  }

  // Boxes along k.
  __device__ int stages() const {
    return (args.A.order * (args.single ? 1 : 2) + kBoxElements - 1) / kBoxElements;
  }

  // body(task) for every task of this cluster with an active matrix.
  template <typename Body>
  __device__ void for_each_task(const Body& body) const {
    for (int i = 0; i < count; ++i) {
      if (tasks[i].state != Task::kNone) body(tasks[i]);
    }
  }
};

#endif

}  // namespace torchium::cuda_kernels::symmetric_product_detail
