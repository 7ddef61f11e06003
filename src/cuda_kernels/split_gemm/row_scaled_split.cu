#include "cuda_kernels/split_gemm/row_scaled_split.h"
#include "cuda_kernels/split_gemm/split_fp16.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

// A block has a tile of 32 rows and 128 columns; a thread has four consecutive columns of a row.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileRows = 32;
constexpr int kTileColumns = 128;
constexpr int64_t kMostRowTiles = 65535;  // of a grid; a block loops over the others

// s with largest 2^s < 2^15. 0 for Inf and NaN, whose row has no finite result.
__device__ int scale_exponent(float largest) {
  if (largest == 0 || !isfinite(largest)) return 0;
  int exponent = 0;
  frexpf(largest, &exponent);
  return min(126, 15 - exponent);
}

__device__ float power_of_two(int exponent) { return ldexpf(1.0f, exponent); }

__device__ void store_pair(__half* hi, __half* lo, int64_t at, const float (&x)[4]) {
  float high[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) high[i] = __half2float(__float2half_rn(x[i]));
  // 8 bytes at a multiple of 4 elements
  auto* high_pairs = reinterpret_cast<__half2*>(hi + at);
  auto* low_pairs = reinterpret_cast<__half2*>(lo + at);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    high_pairs[i / 2] = __floats2half2_rn(high[i], high[i + 1]);
    low_pairs[i / 2] =
        __floats2half2_rn((x[i] - high[i]) * kLowScale, (x[i + 1] - high[i + 1]) * kLowScale);
  }
}

// Columns run along memory, or, transposed, rows do and pass through shared memory.
template <bool transposed>
__global__ void __launch_bounds__(kThreads) split_scaled_kernel(const ScaledSplit split) {
  __shared__ float turned[transposed ? kTileColumns : 1][kTileRows + 1];
  const FloatMatrix& x = split.x;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first_column = int64_t{blockIdx.x} * kTileColumns;
  const int64_t column = first_column + 4 * lane;
  for (int64_t first_row = int64_t{blockIdx.y} * kTileRows; first_row < x.rows;
       first_row += int64_t{gridDim.y} * kTileRows) {
    if constexpr (transposed) {
      __syncthreads();  // the tile before
      for (int c = warp; c < kTileColumns; c += kWarps) {
        if (first_row + lane < x.rows && first_column + c < x.columns) {
          turned[c][lane] =
              x.data[(first_row + lane) * x.row_stride + (first_column + c) * x.column_stride];
        }
      }
      __syncthreads();
    }
    for (int r = warp; r < kTileRows; r += kWarps) {
      const int64_t row = first_row + r;
      if (row >= x.rows || column >= split.pitch) continue;
      const int exponent = split.by_columns ? 0 : scale_exponent(split.largest[row]);
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = 0;
        if (column + i >= x.columns) continue;
        if constexpr (transposed) {
          values[i] = turned[4 * lane + i][r];
        } else {
          values[i] = x.data[row * x.row_stride + column + i];
        }
        const int power = split.by_columns ? scale_exponent(split.largest[column + i]) : exponent;
        values[i] *= power_of_two(power);
      }
      store_pair(split.hi, split.lo, row * split.pitch + column, values);
    }
  }
}

__global__ void __launch_bounds__(kThreads) remove_scales_kernel(const ScaledResult result) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= result.columns) return;
  const int exponent = scale_exponent(result.largest_B[column]);
  for (int64_t row = blockIdx.y; row < result.rows; row += gridDim.y) {
    const float value = result.C[row * result.pitch + column];
    result.out[row * result.row_stride + column] =
        ldexpf(value, -exponent - scale_exponent(result.largest_A[row]));
  }
}

// One block per row of x, whose elements are `step` apart.
__global__ void __launch_bounds__(kThreads)
    largest_of_rows_kernel(const float* x, int64_t rows, int64_t columns, int64_t row_stride,
                           int64_t step, unsigned* largest) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    unsigned most = 0;
    for (int64_t column = threadIdx.x; column < columns; column += kThreads) {
      most = max(most, __float_as_uint(x[row * row_stride + column * step]) & 0x7fffffff);
    }
    most = __reduce_max_sync(0xffffffff, most);
    if (threadIdx.x % 32 == 0) atomicMax(&largest[row], most);
  }
}

// A block takes kTileColumns columns, which are contiguous in memory, of kRowsOfBlock rows.
constexpr int64_t kRowsOfBlock = 512;
__global__ void __launch_bounds__(kThreads)
    largest_of_columns_kernel(const float* x, int64_t rows, int64_t columns, int64_t row_stride,
                              unsigned* largest) {
  __shared__ unsigned found[kTileColumns];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first_column = int64_t{blockIdx.x} * kTileColumns + lane;
  if (threadIdx.x < kTileColumns) found[threadIdx.x] = 0;
  __syncthreads();
  unsigned most[4] = {0, 0, 0, 0};
  for (int64_t span = blockIdx.y; span * kRowsOfBlock < rows; span += gridDim.y) {
    const int64_t end = min((span + 1) * kRowsOfBlock, rows);
    for (int64_t row = span * kRowsOfBlock + warp; row < end; row += kWarps) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t column = first_column + 32 * i;
        if (column >= columns) continue;
        most[i] = max(most[i], __float_as_uint(x[row * row_stride + column]) & 0x7fffffff);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicMax(&found[lane + 32 * i], most[i]);
  __syncthreads();
  const int64_t column = int64_t{blockIdx.x} * kTileColumns + threadIdx.x;
  if (threadIdx.x < kTileColumns && column < columns)
    atomicMax(&largest[column], found[threadIdx.x]);
}

unsigned blocks(int64_t size, int64_t tile) {
  return static_cast<unsigned>((size + tile - 1) / tile);
}

}  // namespace

cudaError_t find_largest(const FloatMatrix& x, bool by_columns, float* largest,
                         cudaStream_t stream) {
  // Magnitudes as bits order like the floats.
  auto* bits = reinterpret_cast<unsigned*>(largest);
  // The matrix whose rows' largest elements are asked for.
  const int64_t rows = by_columns ? x.columns : x.rows, columns = by_columns ? x.rows : x.columns;
  const int64_t row_stride = by_columns ? x.column_stride : x.row_stride;
  const int64_t step = by_columns ? x.row_stride : x.column_stride;
  if (row_stride ==
      1) {  // its columns run along memory: it is the transpose of one with rows that do
    const dim3 grid(blocks(rows, kTileColumns), static_cast<unsigned>(std::min<int64_t>(
                                                    kMostRowTiles, blocks(columns, kRowsOfBlock))));
    largest_of_columns_kernel<<<grid, kThreads, 0, stream>>>(x.data, columns, rows, step, bits);
  } else {
    constexpr int64_t kMostBlocks = 1 << 16;
    largest_of_rows_kernel<<<static_cast<unsigned>(std::min(kMostBlocks, rows)), kThreads, 0,
                             stream>>>(x.data, rows, columns, row_stride, step, bits);
  }
  return cudaGetLastError();
}

cudaError_t split_scaled(const ScaledSplit& split, cudaStream_t stream) {
  const dim3 grid(
      blocks(split.pitch, kTileColumns),
      static_cast<unsigned>(std::min<int64_t>(kMostRowTiles, blocks(split.x.rows, kTileRows))));
  if (split.x.column_stride == 1) {
    split_scaled_kernel<false><<<grid, kThreads, 0, stream>>>(split);
  } else {
    split_scaled_kernel<true><<<grid, kThreads, 0, stream>>>(split);
  }
  return cudaGetLastError();
}

cudaError_t remove_scales(const ScaledResult& result, cudaStream_t stream) {
  // Enough rows of blocks to fill a device; each takes every so many rows.
  constexpr int64_t kRowBlocks = 1024;
  const dim3 grid(blocks(result.columns, kThreads),
                  static_cast<unsigned>(std::min(kRowBlocks, result.rows)));
  remove_scales_kernel<<<grid, kThreads, 0, stream>>>(result);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
