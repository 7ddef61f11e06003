#include "cuda_kernels/split_mma.cuh"
#include "cuda_kernels/symmetric_product.h"
#include "cuda_kernels/wgmma.cuh"

namespace torchium::cuda_kernels {
namespace {

// A block computes one tile of C, its two warpgroups one half of the rows each.
constexpr int kTile = 128;
constexpr int kDepth = 64;  // of a stage, along k: rows of 128 bytes
constexpr int kThreads = 256;
constexpr int kStages = 3;
constexpr int kTileBytes = kTile * kDepth * 2;
constexpr int kStageBytes = 4 * kTileBytes;  // hi and lo of A and B
constexpr int kSharedBytes = kStages * kStageBytes + 1024;

// Results pass through shared memory, in rows that start in different banks.
constexpr int kStride = kTile + 8;
static_assert(4 * kTile * kStride * 2 <= kStages * kStageBytes);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ void copy_async(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

class TileProduct {
 public:
  __device__ TileProduct(const SymmetricProduct& arguments, char* shared, int64_t matrix, int tile)
      : args_(arguments), shared_(shared), matrix_(matrix), order_(arguments.A.order) {
    // Tiles of the lower triangle, row by row.
    int row = static_cast<int>((sqrtf(8.0f * tile + 1.0f) - 1.0f) / 2.0f);
    while (row * (row + 1) / 2 > tile) --row;
    while ((row + 1) * (row + 2) / 2 <= tile) ++row;
    row_ = row * kTile;
    column_ = (tile - row * (row + 1) / 2) * kTile;
    // On the diagonal of a square both operands are the same tile.
    shares_ = row_ == column_ && arguments.A.data == arguments.B.data;
  }

  __device__ void run() {
    float sum[64];
    accumulate(sum);
    finish(sum);
    __syncthreads();  // the products have been read out of the stages
    stage_result(sum);
    __syncthreads();
    write(row_, column_, 0);
    if (row_ != column_) write(column_, row_, 2);
  }

 private:
  __device__ uint32_t stage(int k) const {
    return shared_address(shared_) + k % kStages * kStageBytes;
  }

  // One of the four tiles of a stage: rows [row, row + kTile), halves [k, k + kDepth).
  __device__ void load_tile(uint32_t target, const __half* source, int row, int k) const {
#pragma unroll
    for (int i = 0; i < kTile * kDepth / 8 / kThreads; ++i) {
      const int piece = i * kThreads + threadIdx.x;
      const int r = piece / (kDepth / 8), c = piece % (kDepth / 8);
      const bool valid = row + r < order_ && k + 8 * c < order_;
      const int64_t offset = valid ? int64_t{row + r} * order_ + k + 8 * c : 0;
      copy_async(target + r * (kDepth * 2) + (c ^ (r % 8)) * 16, source + offset, valid);
    }
  }

  __device__ void load_stage(int index) const {
    const int k = index * kDepth;
    const uint32_t target = stage(index);
    load_tile(target, args_.A.hi(matrix_), row_, k);
    load_tile(target + kTileBytes, args_.A.lo(matrix_), row_, k);
    if (!shares_) {
      load_tile(target + 2 * kTileBytes, args_.B.hi(matrix_), column_, k);
      load_tile(target + 3 * kTileBytes, args_.B.lo(matrix_), column_, k);
    }
  }

  // sum = A B of this tile. B is symmetric: its rows serve as columns.
  __device__ void accumulate(float (&sum)[64]) const {
    const int stages = (order_ + kDepth - 1) / kDepth;
    float main[64], cross[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = 0;
    load_stage(0);
    commit_copies();
    for (int first = 0; first < stages; first += args_.stages_per_sum) {
      const int end = min(stages, first + args_.stages_per_sum);
      for (int index = first; index < end; ++index) {
        wait_for_copies<0>();
        // The copies are ordinary writes to shared memory, which the tensor cores do not see yet.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        // All products but those of the stage before are done: its place is not written.
        if (index + 1 < stages) load_stage(index + 1);
        commit_copies();
        multiply_stage(index, index > first, index > 0, main, cross);
        wgmma_wait<1>();
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] += main[i];
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = fmaf(cross[i], 1.0f / kLowScale, sum[i]);
  }

  __device__ void multiply_stage(int index, int add_main, int add_cross, float (&main)[64],
                                 float (&cross)[64]) const {
    const uint32_t A = stage(index) + threadIdx.x / 128 * (kTileBytes / 2);
    const uint32_t B = stage(index) + (shares_ ? 0 : 2 * kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth * 2; k += 32) {  // bytes
      const uint64_t a_hi = tile_descriptor(A + k);
      const uint64_t a_lo = tile_descriptor(A + kTileBytes + k);
      const uint64_t b_hi = tile_descriptor(B + k);
      const uint64_t b_lo = tile_descriptor(B + kTileBytes + k);
      wgmma_64x128x16(main, a_hi, b_hi, k > 0 || add_main);
      wgmma_64x128x16(cross, a_hi, b_lo, k > 0 || add_cross);
      wgmma_64x128x16(cross, a_lo, b_hi, 1);
    }
    wgmma_commit();
  }

  // body(row, column, i): i and i + 1 are the elements of this tile at (row, column), (row,
  // column + 1).
  template <typename Body>
  __device__ void for_each_pair(const Body& body) const {
    const int first_row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const int first_column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        body(first_row + 8 * side, first_column + 8 * j, 4 * j + 2 * side);
      }
    }
  }

  // From the product to the elements of C.
  __device__ void finish(float (&x)[64]) const {
    const float alpha = args_.alpha;
    if (args_.coefficients == nullptr) {
#pragma unroll
      for (int i = 0; i < 64; ++i) x[i] *= alpha;
      return;
    }
    const float* coefficients = args_.coefficients + 3 * matrix_;
    const float a = alpha * coefficients[0];
    const float b = alpha * coefficients[1];
    const float c = alpha * coefficients[2];
    const __half* hi = args_.A.hi(matrix_);
    const __half* lo = args_.A.lo(matrix_);
    for_each_pair([&](int r, int s, int i) {
      const int row = row_ + r, column = column_ + s;
      if (row >= order_ || column >= order_) return;
      const int64_t offset = int64_t{row} * order_ + column;
      const __half2 high = *reinterpret_cast<const __half2*>(hi + offset);
      const __half2 low = *reinterpret_cast<const __half2*>(lo + offset);
      x[i] = fmaf(c, x[i], b * join(high.x, low.x));
      x[i + 1] = fmaf(c, x[i + 1], b * join(high.y, low.y));
      if (row == column && row < args_.n) x[i] += a;
      if (row == column + 1 && row < args_.n) x[i + 1] += a;
    });
  }

  __device__ __half* staged(int which) const {
    return reinterpret_cast<__half*>(shared_) + which * kTile * kStride;
  }

  // hi and lo of the tile (0 and 1) and of its mirror image (2 and 3). A tile on the diagonal is
  // its own mirror image: its lower triangle counts.
  __device__ void stage_result(const float (&x)[64]) const {
    const bool diagonal = row_ == column_;
    const int mirrored = diagonal ? 0 : 2;
    for_each_pair([&](int r, int s, int i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (diagonal && s + e > r) continue;
        __half hi, lo;
        split(x[i + e], hi, lo);
        staged(0)[r * kStride + s + e] = hi;
        staged(1)[r * kStride + s + e] = lo;
        if (diagonal && s + e == r) continue;
        staged(mirrored)[(s + e) * kStride + r] = hi;
        staged(mirrored + 1)[(s + e) * kStride + r] = lo;
      }
    });
  }

  __device__ void write(int row, int column, int which) const {
    __half* const targets[2] = {args_.C.hi(matrix_), args_.C.lo(matrix_)};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const __half* source = staged(which + part);
      for (int piece = threadIdx.x; piece < kTile * kTile / 8; piece += kThreads) {
        const int r = piece / (kTile / 8), c = piece % (kTile / 8) * 8;
        if (row + r < order_ && column + c < order_) {
          *reinterpret_cast<uint4*>(targets[part] + int64_t{row + r} * order_ + column + c) =
              *reinterpret_cast<const uint4*>(source + r * kStride + c);
        }
      }
    }
  }

  const SymmetricProduct& args_;
  char* const shared_;
  const int64_t matrix_;
  const int order_;
  int row_, column_;
  bool shares_;
};
#endif

__global__ void __launch_bounds__(kThreads, 1)
    symmetric_product_kernel(const __grid_constant__ SymmetricProduct arguments, int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const int64_t matrix = blockIdx.x / tiles;
  if (arguments.steps[matrix] <= arguments.step) return;
  extern __shared__ char shared[];
  char* aligned = shared + (1024 - shared_address(shared) % 1024) % 1024;
  TileProduct(arguments, aligned, matrix, blockIdx.x % tiles).run();
#endif
}

}  // namespace

bool has_symmetric_product(int major, int minor, int shared_bytes) {
#ifdef TORCHIUM_HAS_SM90A
  return major == 9 && minor == 0 && shared_bytes >= kSharedBytes;
#else
  return false;
#endif
}

cudaError_t symmetric_product(const SymmetricProduct& arguments, cudaStream_t stream) {
  if (arguments.matrices == 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      symmetric_product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int side = (arguments.A.order + kTile - 1) / kTile;
  const int tiles = side * (side + 1) / 2;
  symmetric_product_kernel<<<static_cast<unsigned>(arguments.matrices * tiles), kThreads,
                             kSharedBytes, stream>>>(arguments, tiles);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
