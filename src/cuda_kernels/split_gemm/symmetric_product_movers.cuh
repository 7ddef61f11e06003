// The warps that load operands of symmetric products and move staged results.
#pragma once

#include "cuda_kernels/split_gemm/symmetric_product_block.cuh"

namespace torchium::cuda_kernels::symmetric_product_detail {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Loads A and B. One thread.
__device__ inline void load_operands(const Block& block, const TileMaps& maps) {
  Position<kStages> position;
  block.for_each_task([&](const Task& task) {
    const TilePosition tile = task.tile;
    const bool is_mine = task.is_mine();
    const bool has_B = !block.shares(tile);
    const bool is_first = block.args.first_B.data != nullptr && task.state == Task::kStarts;
    const TileMap& B = is_first ? maps.first_B : maps.B;
    const TileMap& A = is_first && block.args.A.data == block.args.B.data ? B : maps.A;
    for (int index = 0; index < block.stages(); ++index, position.advance()) {
      const uint32_t target = block.stage(position.slot()), full = block.full(position.slot());
      wait_for(block.empty(position.slot()), position.parity() ^ 1);
      if (!is_mine) {
        arrive(full);
        continue;
      }
      arrive_and_expect(full, (has_B ? 2 : 1) * kTileBytes);
      const int x = index * kBoxElements;
      for (uint32_t half = 0; half < 2; ++half) {
        const int y = tile.row + half * kBoxRows;
        const uint32_t a = target + half * kBoxBytes;
        if (!tile.shares_row) {
          copy_box(a, A, x, y, tile.matrix, full);
        } else if (half == block.rank) {
          copy_box_to_all(a, A, x, y, tile.matrix, full, (1 << kBlocks) - 1);
        }
        if (has_B) {
          copy_box(a + kTileBytes, B, x, tile.column + half * kBoxRows, tile.matrix, full);
        }
      }
    }
  });
}

// Moves D and E to the staging area of a warpgroup, and C from there. One thread.
class Mover {
 public:
  __device__ Mover(const Block& block, const TileMaps& maps, int group)
      : block_(block), args_(block.args), maps_(maps), group_(group) {}

  // On the diagonal, the part above it comes from the mirror image of the second half.
  __device__ void run() {
    block_.for_each_task([&](const Task& task) {
      if (!task.is_mine()) return;
      const TilePosition& tile = task.tile;
      const int row = tile.row + group_ * kBoxRows;
      const bool is_diagonal = tile.row == tile.column;
      load(tile, row);
      write(tile.matrix, {row, tile.column, 1, is_diagonal && group_ == 0 ? kTile / 2 : kTile, 1});
      if (is_diagonal && group_ == 0) return;
      arrive(block_.ready(group_));
      write(tile.matrix, {tile.column, row, is_diagonal ? 1 : 2, kTile / 2, 2});
    });
  }

 private:
  // Destination of the staged boxes: `height` boxes down, `width` columns. Horizontal neighbours
  // are `stride` boxes apart in the staging area.
  struct Part {
    int row, column, height, width, stride;
  };

  static __device__ int columns_of_box(bool single) {
    return single ? kBoxElements : kBoxElements / 2;
  }

  __device__ void load(const TilePosition& tile, int row) const {
    const uint32_t ready = block_.ready(group_);
    const bool has_D = args_.D.data != nullptr, has_E = args_.E.data != nullptr;
    const int boxes_of_D = has_D ? kTile / columns_of_box(args_.single_D) : 0;
    const int boxes_of_E = has_E ? kTile / kBoxElements : 0;
    arrive_and_expect(ready, (boxes_of_D + boxes_of_E) * kBoxBytes);
    const int left = args_.single_D ? tile.column : 2 * tile.column;
    for (int i = 0; i < boxes_of_D; ++i) {
      copy_box(box(i), maps_.D, left + i * kBoxElements, row, tile.matrix, ready);
    }
    for (int i = 0; i < boxes_of_E; ++i) {
      copy_box(box(2 + i), maps_.E, tile.column + i * kBoxElements, row, tile.matrix, ready);
    }
  }

  __device__ void write(int matrix, const Part& part) {
    wait_for(block_.staged(group_), parity_);
    parity_ ^= 1;
    const int left = args_.single_C ? part.column : 2 * part.column;
    for (int i = 0; i < part.width / columns_of_box(args_.single_C); ++i) {
      for (int j = 0; j < part.height; ++j) {
        const int x = left + i * kBoxElements, y = part.row + j * kBoxRows;
        write_box(box(i * part.stride + j), maps_.C, x, y, matrix);
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

#endif

}  // namespace torchium::cuda_kernels::symmetric_product_detail
