#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/samples/sample_norms.h"

namespace torchium::cuda_kernels {
namespace {

// A block computes a tile of K on or below the diagonal. Its groups of threads share the terms; the
// eight warps of a group take 16 rows and 8 columns each.
constexpr int kTile = 32;
constexpr int kGroup = 256;  // threads
constexpr int kGroups = 2;
constexpr int kDepth = 64;          // terms of a stage
constexpr int kPitch = kDepth + 4;  // no bank holds two of the elements that a warp reads at a time
constexpr int kLoads = kTile * kDepth / kGroup;  // elements of a stage of one operand, per thread

using Stage = double[kTile][kPitch];

struct Shared {
  Stage rows[kGroups], columns[kGroups];
};

#if __CUDA_ARCH__ >= 800

// c += a b: 8 x 4 times 4 x 8. Lane i holds a[i / 4][i % 4], b[i % 4][i / 4], and of c[i / 4] the
// columns i % 4 * 2 and that plus 1.
__device__ void mma(double (&c)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c[0]), "+d"(c[1])
      : "d"(a), "d"(b));
}

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
  static __device__ int thread() { return static_cast<int>(threadIdx.x) % kGroup; }
  static __device__ int row_of(int i) { return i * (kGroup / kDepth) + thread() / kDepth; }

  const float* X_;
  int64_t pitch_;
  int rows_, size_;
};

// The rows and columns of the tile of which this thread has elements.
struct Place {
  int group = static_cast<int>(threadIdx.x) / kGroup;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int warp = static_cast<int>(threadIdx.x) / 32 % (kGroup / 32);
  int row = warp / 4 * 16 + lane / 4;
  int first_column = warp % 4 * 8;
};

// The sums over the groups, in the first one.
__device__ void add_up_groups(const Place& place, double (&sums)[2][2], Shared& shared) {
  auto* parts = reinterpret_cast<double(*)[kGroup][4]>(shared.rows);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
#pragma unroll
  for (int i = 0; i < 4; ++i) parts[place.group][thread][i] = sums[i / 2][i % 2];
  __syncthreads();
  if (place.group > 0) return;
#pragma unroll
  for (int group = 1; group < kGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i / 2][i % 2] += parts[group][thread][i];
  }
}

// The inner products of 32 rows of X from `top` on with 32 rows from `left` on, in the first group:
// sums[h] in the rows 8 h + place.row.
__device__ void inner_products(const float* X, int64_t pitch, int samples, int size, int top,
                               int left, double (&sums)[2][2], Shared& shared) {
  const Place place;
  const int step = kGroups * kDepth, own = place.group * kDepth;
  const int column = place.first_column + place.lane / 4;
  const Operand rows(X, pitch, top, samples, size), columns(X, pitch, left, samples, size);
  Stage &of_rows = shared.rows[place.group], &of_columns = shared.columns[place.group];
  float next[2][kLoads];
  rows.load(own, next[0]);
  columns.load(own, next[1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) sums[h][0] = sums[h][1] = 0;
  for (int begin = 0; begin < size; begin += step) {
    __syncthreads();  // nobody reads the stage before
    Operand::store(next[0], of_rows);
    Operand::store(next[1], of_columns);
    __syncthreads();
    if (begin + own >= size) continue;
    rows.load(begin + step + own, next[0]);  // in flight during the products
    columns.load(begin + step + own, next[1]);
#pragma unroll
    for (int k = 0; k < kDepth; k += 4) {
      const double b = of_columns[column][k + place.lane % 4];
      mma(sums[0], of_rows[place.row][k + place.lane % 4], b);
      mma(sums[1], of_rows[place.row + 8][k + place.lane % 4], b);
    }
  }
  add_up_groups(place, sums, shared);
}

#endif

__global__ void __launch_bounds__(kGroups* kGroup)
    pair_gram_kernel(const __grid_constant__ PairGram arguments) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ double memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const TriangleTile tile(static_cast<int>(blockIdx.x));
  const int top = tile.row * kTile, left = tile.column * kTile, n = arguments.samples;
  double total[2][2] = {};
  for (int i = 0; i < arguments.count; ++i) {
    const SamplePair& pair = arguments.pairs[i];
    double A[2][2] = {}, G[2][2];
    if (pair.A != nullptr) {
      inner_products(pair.A, pair.A_pitch, n, pair.fan_in, top, left, A, shared);
    }
    inner_products(pair.G, pair.G_pitch, n, pair.fan_out, top, left, G, shared);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        total[h][e] += (pair.weight * A[h][e] + pair.bias_weight) * G[h][e];
      }
    }
  }
  const Place place;
  if (place.group > 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = top + place.row + 8 * h;
      const int j = left + place.first_column + place.lane % 4 * 2 + e;
      if (i >= n || j > i) continue;
      double* element = arguments.K + int64_t{i} * n + j;
      const double value = total[h][e] + (arguments.beta == 0 ? 0.0 : arguments.beta * *element);
      *element = value;
      arguments.K[int64_t{j} * n + i] = value;
    }
  }
#endif
}

}  // namespace

cudaError_t pair_gram(const PairGram& arguments, cudaStream_t stream) {
  if (arguments.samples == 0) return cudaSuccess;
  const int tiles = triangle_tiles((arguments.samples + kTile - 1) / kTile);
  const cudaError_t error = cudaFuncSetAttribute(
      pair_gram_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  pair_gram_kernel<<<tiles, kGroups * kGroup, sizeof(Shared), stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
