#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/samples/sample_norms.h"

namespace torchium::cuda_kernels {
namespace {

// A block computes a tile of K on or below the diagonal. Its eight warps take 16 rows and 8 columns
// each.
constexpr int kTile = 32;
constexpr int kThreads = 256;
constexpr int kDepth = 64;          // terms of a stage
constexpr int kPitch = kDepth + 4;  // no bank holds two of the elements that a warp reads at a time
constexpr int kLoads = kTile * kDepth / kThreads;  // elements of a stage of one operand, per thread

#if __CUDA_ARCH__ >= 800

// c += a b: 8 x 4 times 4 x 8. Lane i holds a[i / 4][i % 4], b[i % 4][i / 4], and of c[i / 4] the
// columns i % 4 * 2 and that plus 1.
__device__ void mma(double (&c)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c[0]), "+d"(c[1])
      : "d"(a), "d"(b));
}

using Stage = double[kTile][kPitch];

// 32 rows of X [rows, size], beginning with row `first`; zeros beyond.
class Operand {
 public:
  __device__ Operand(const float* X, int64_t pitch, int first, int rows, int size)
      : X_(X + first * pitch), pitch_(pitch), rows_(rows - first), size_(size) {}

  // The elements of a stage that this thread loads.
  __device__ void load(int begin, float (&x)[kLoads]) const {
    const int column = begin + thread() % kDepth;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = row_of(i);
      x[i] = row < rows_ && column < size_ ? X_[row * pitch_ + column] : 0.0f;
    }
  }

  static __device__ void store(const float (&x)[kLoads], Stage& stage) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) stage[row_of(i)][thread() % kDepth] = x[i];
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int row_of(int i) { return i * (kThreads / kDepth) + thread() / kDepth; }

  const float* X_;
  int64_t pitch_;
  int rows_, size_;
};

// The inner products of 32 rows of X from `top` on with 32 rows from `left` on: of this warp's rows
// from `row` on, sums[h] in the rows 8 h + lane / 4.
__device__ void inner_products(const float* X, int64_t pitch, int samples, int size, int top,
                               int left, double (&sums)[2][2], Stage (&stages)[2]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp / 4 * 16 + lane / 4, column = warp % 4 * 8 + lane / 4;
  const Operand rows(X, pitch, top, samples, size), columns(X, pitch, left, samples, size);
  float next[2][kLoads];
  rows.load(0, next[0]);
  columns.load(0, next[1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) sums[h][0] = sums[h][1] = 0;
  for (int begin = 0; begin < size; begin += kDepth) {
    __syncthreads();  // nobody reads the stage before
    Operand::store(next[0], stages[0]);
    Operand::store(next[1], stages[1]);
    __syncthreads();
    rows.load(begin + kDepth, next[0]);  // in flight during the products
    columns.load(begin + kDepth, next[1]);
#pragma unroll
    for (int k = 0; k < kDepth; k += 4) {
      const double b = stages[1][column][k + lane % 4];
      mma(sums[0], stages[0][row][k + lane % 4], b);
      mma(sums[1], stages[0][row + 8][k + lane % 4], b);
    }
  }
}

#endif

__global__ void __launch_bounds__(kThreads)
    pair_gram_kernel(const __grid_constant__ PairGram arguments) {
#if __CUDA_ARCH__ >= 800
  __shared__ Stage stages[2];
  const TriangleTile tile(static_cast<int>(blockIdx.x));
  const int top = tile.row * kTile, left = tile.column * kTile, n = arguments.samples;
  double total[2][2] = {};
  for (int i = 0; i < arguments.count; ++i) {
    const SamplePair& pair = arguments.pairs[i];
    double A[2][2] = {}, G[2][2];
    if (pair.A != nullptr) {
      inner_products(pair.A, pair.A_pitch, n, pair.fan_in, top, left, A, stages);
    }
    inner_products(pair.G, pair.G_pitch, n, pair.fan_out, top, left, G, stages);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        total[h][e] += (pair.weight * A[h][e] + pair.bias_weight) * G[h][e];
      }
    }
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = top + warp / 4 * 16 + 8 * h + lane / 4;
      const int j = left + warp % 4 * 8 + lane % 4 * 2 + e;
      if (i >= n || j > i) continue;
      double* place = arguments.K + int64_t{i} * n + j;
      const double value = total[h][e] + (arguments.beta == 0 ? 0.0 : arguments.beta * *place);
      *place = value;
      arguments.K[int64_t{j} * n + i] = value;
    }
  }
#endif
}

}  // namespace

cudaError_t pair_gram(const PairGram& arguments, cudaStream_t stream) {
  if (arguments.samples == 0) return cudaSuccess;
  const int tiles = triangle_tiles((arguments.samples + kTile - 1) / kTile);
  pair_gram_kernel<<<tiles, kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
