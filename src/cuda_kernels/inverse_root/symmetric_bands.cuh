// Passes over symmetric matrices in bands of 32 rows, and block-wide sums.
#pragma once

#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/inverse_root/newton_plan.cuh"
#include "cuda_kernels/split_gemm/split_matrices.h"

#include <cstdint>

namespace torchium::cuda_kernels {

constexpr int kBand = 32;  // rows and columns of a tile
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerWarp = kBand / kWarps;

__host__ __device__ inline int bands_of(int n) { return (n + kBand - 1) / kBand; }

static_assert(kBand == kSplitPadding);

inline unsigned blocks(int64_t count) { return static_cast<unsigned>(count); }

// Eight consecutive elements of a row per thread, for passes over split matrices.
struct Piece {
  int64_t matrix;
  int row, column;  // the row may be past the last one
};

inline int64_t blocks_of_pieces(int order) {
  return (int64_t{order} * (order / 8) + kThreads - 1) / kThreads;
}

__device__ inline Piece piece_of_thread(int order, int64_t blocks_of_matrix) {
  const int64_t index = blockIdx.x % blocks_of_matrix * kThreads + threadIdx.x;
  return {blockIdx.x / blocks_of_matrix, static_cast<int>(index / (order / 8)),
          static_cast<int>(index % (order / 8)) * 8};
}

__device__ inline float larger(float a, float b) { return a > b || a != a ? a : b; }  // NaN wins

template <typename T, typename Combine>
__device__ T combine_warp(T x, const Combine& combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
  }
  return x;
}

// The same, in all threads of the block.
template <int warps = kWarps>
__device__ inline double block_sum(double x, double* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < warps; ++warp) sum += scratch[warp];
  return sum;
}

template <int warps = kWarps>
__device__ inline float block_largest(float x, float* scratch) {
  x = combine_warp(x, larger);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float largest = 0;
  for (int warp = 0; warp < warps; ++warp) largest = larger(largest, scratch[warp]);
  return largest;
}

// A tile of a matrix and the transpose of its mirror image; zero outside n x n.
class SymmetricTile {
 public:
  // The elements of a tile and its mirror image that one thread loads.
  struct Part {
    float direct[kRowsPerWarp], mirror[kRowsPerWarp];
  };

  static __device__ Part fetch(const float* A, int n, int row, int column) {
    const int lane = threadIdx.x % 32;
    Part part;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int r = threadIdx.x / 32 + i * kWarps;
      part.direct[i] =
          row + r < n && column + lane < n ? A[int64_t{row + r} * n + column + lane] : 0;
      part.mirror[i] =
          column + r < n && row + lane < n ? A[int64_t{column + r} * n + row + lane] : 0;
    }
    return part;
  }
  __device__ void put(const Part& part) {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      direct_[threadIdx.x / 32 + i * kWarps][threadIdx.x % 32] = part.direct[i];
      mirror_[threadIdx.x / 32 + i * kWarps][threadIdx.x % 32] = part.mirror[i];
    }
  }
  // An element of the symmetric part, as a / 2 + b / 2, because a + b may overflow.
  __device__ float at(int r, int c) const { return 0.5f * direct_[r][c] + 0.5f * mirror_[c][r]; }

 private:
  float direct_[kBand][kBand + 1], mirror_[kBand][kBand + 1];
};

// images[i] = sum_j S_ij v_j, [matrices, order], for one band of rows; v: random signs or
// `vectors`. With random signs also the band's largest magnitude, row sum of magnitudes and sum of
// squares. In double, because nothing is scaled yet.
template <bool by_signs>
__global__ void __launch_bounds__(kThreads)
    band_kernel(const float* A, int n, const float* vectors, int order, double* images,
                double* partials) {
  const int bands = bands_of(n);
  const int64_t matrix = blockIdx.x / bands;
  const int row = blockIdx.x % bands * kBand;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ SymmetricTile tile;
  double image[kRowsPerWarp] = {}, magnitudes[kRowsPerWarp] = {}, square = 0;
  float largest = 0;
  SymmetricTile::Part next = SymmetricTile::fetch(A + matrix * n * n, n, row, 0);
  for (int column = 0; column < n; column += kBand) {
    __syncthreads();
    tile.put(next);
    __syncthreads();
    if (column + kBand < n) {
      next = SymmetricTile::fetch(A + matrix * n * n, n, row, column + kBand);
    }
    const int j = column + lane;
    const float v = j >= n ? 0 : by_signs ? probe_sign(j) : vectors[matrix * order + j];
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const double x = tile.at(warp * kRowsPerWarp + i, lane);
      image[i] += x * v;
      if (by_signs) {
        magnitudes[i] += fabs(x);
        square += x * x;
        largest = larger(largest, fabsf(static_cast<float>(x)));
      }
    }
  }
  double most = 0;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const double sum = warp_sum(image[i]);
    const int r = row + warp * kRowsPerWarp + i;
    if (lane == 0 && r < n) images[matrix * order + r] = sum;
    if (by_signs) most = fmax(most, warp_sum(magnitudes[i]));
  }
  if (!by_signs) return;
  __shared__ double sums[kWarps];
  __shared__ float maxima[kWarps];
  square = block_sum(square, sums);
  largest = block_largest(largest, maxima);
  __syncthreads();
  if (lane == 0) sums[warp] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w) most = fmax(most, sums[w]);
    double* partial = partials + 3 * blockIdx.x;
    partial[0] = largest;
    partial[1] = most;
    partial[2] = square;
  }
}

}  // namespace torchium::cuda_kernels
