// The warpgroups that compute symmetric products.
#pragma once

#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/common/wgmma.cuh"
#include "cuda_kernels/split_gemm/split_mma.cuh"
#include "cuda_kernels/split_gemm/symmetric_product_block.cuh"

namespace torchium::cuda_kernels::symmetric_product_detail {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One of the two consumer warpgroups.
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
      const float4 coefficients = coefficients_of(task);  // in flight during the product
      float x[64];
      accumulate(block_.shares(task.tile), x);
      wait_until_ready();
      finish(task.tile, coefficients, x);
      if (args_.squares != nullptr) add_squares(task.tile, x);
      store(task.tile, x);
    });
  }

 private:
  // Waits for and releases the stages of tiles that only the other block computes. No product keeps
  // the four warps together here. Without their barrier the first warp could release a stage, and
  // it could be filled again, before a slow warp has seen the end of its phase: that warp would
  // wait for a parity that never comes.
  __device__ void skip() {
    for (int index = 0; index < block_.stages(); ++index, position_.advance()) {
      wait_for(block_.full(position_.slot()), position_.parity());
      warpgroup_sync(1 + group_);
      release(position_.slot());
    }
  }

  // This warpgroup no longer reads the stage.
  __device__ void release(uint32_t slot) const {
    if (thread_ < kBlocks) arrive_at(block_.empty(slot), thread_);
  }

  // sum = A B for this tile. B is symmetric: its rows are its columns.
  __device__ void accumulate(bool shares, float (&sum)[64]) {
    float main[64], cross[64];
    const int stages = block_.stages();
    const int per_sum = single ? stages : args_.terms_per_sum / kSplitPadding;
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = 0;
      // The wait at the end of each sum must be unconditional: otherwise the compiler cannot prove
      // that no product is in flight when registers are read, and serialises all products.
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

  // A box has 64 fp16 numbers along k: 32 hi and their 32 lo, or 64 hi for a single product.
  __device__ void multiply(uint32_t slot, bool shares, int add_main, int add_cross,
                           float (&main)[64], float (&cross)[64]) const {
    const uint32_t A = block_.stage(slot) + group_ * kBoxBytes;
    const uint32_t B = block_.stage(slot) + (shares ? 0 : kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBoxElements; k += 32) {  // bytes
      const uint64_t a_first = tile_descriptor(A + k);
      const uint64_t a_second = tile_descriptor(A + kBoxElements + k);
      const uint64_t b_first = tile_descriptor(B + k);
      const uint64_t b_second = tile_descriptor(B + kBoxElements + k);
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

  // One sum per warp and tile; a tile below the diagonal counts twice.
  __device__ void add_squares(const TilePosition& tile, const float (&x)[64]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) sum = fmaf(x[i], x[i], sum);
    sum = warp_sum(sum);
    if (lane_ != 0) return;
    const int row = tile.row / kTile;
    const int index =
        (triangle_tiles(row) + tile.column / kTile) * kSumsOfTile + 4 * group_ + warp_;
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

  // Two 8 x 8 parts one below the other, and two to their right: this lane's address for ldmatrix
  // and stmatrix, for the columns from 8 j.
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

  // lo is 64 bytes after hi, in every permutation.
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

  // Replaces the diagonal square's upper triangle by the mirror image of the lower one. They differ
  // by rounding, which the iteration amplifies.
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
      load_matrices<true>(mirrored_hi, address);
      load_matrices<true>(mirrored_lo, low(address));
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

  // Elements above the diagonal come from the mirror image: the first of the two is `above` columns
  // right of the diagonal.
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

}  // namespace torchium::cuda_kernels::symmetric_product_detail
