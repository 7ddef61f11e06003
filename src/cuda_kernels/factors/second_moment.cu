#include "cuda_kernels/factors/second_moment.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kTile = 32;
constexpr int kThreadRows = 8;

// Element (i, j) of X X^T with the row of sums; j <= i.
__device__ float element(const SecondMoment& moment, int i, int j) {
  const int64_t group = blockIdx.y;
  const int n = moment.n, pitch = moment.pitch, channels = n / moment.pixels;
  const auto place = [&](int k) { return k % moment.pixels * channels + k / moment.pixels; };
  if (i < n) return moment.product[(group * pitch + place(i)) * pitch + place(j)];
  return j < n ? moment.sums[group * pitch + place(j)] : moment.count;
}

// One tile on or below the diagonal, and its mirror image.
__global__ void __launch_bounds__(kTile* kThreadRows) store_kernel(const SecondMoment moment) {
  __shared__ float values[kTile][kTile + 1];
  const int index = static_cast<int>(blockIdx.x);
  int row = static_cast<int>((sqrtf(8.0f * static_cast<float>(index) + 1) - 1) / 2);
  while (row * (row + 1) / 2 > index) --row;
  while ((row + 1) * (row + 2) / 2 <= index) ++row;
  const int top = row * kTile, left = (index - row * (row + 1) / 2) * kTile;
  const int order = moment.n + (moment.sums == nullptr ? 0 : 1);
  float* target = moment.target + int64_t{blockIdx.y} * order * order;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kThreadRows) {
    const int i = top + y, j = left + x;
    if (i >= order || j > i) continue;
    float* place = target + int64_t{i} * order + j;
    const float value = element(moment, i, j) + (moment.accumulate ? *place : 0.0f);
    *place = value;
    values[y][x] = value;
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kThreadRows) {
    const int i = left + y, j = top + x;
    if (j < order && i < j) target[int64_t{i} * order + j] = values[x][y];
  }
}

}  // namespace

cudaError_t store_second_moment(const SecondMoment& moment, cudaStream_t stream) {
  const int order = moment.n + (moment.sums == nullptr ? 0 : 1);
  const unsigned rows = (order + kTile - 1) / kTile;
  const dim3 blocks(rows * (rows + 1) / 2, moment.groups);
  if (blocks.x == 0 || blocks.y == 0) return cudaSuccess;
  store_kernel<<<blocks, dim3(kTile, kThreadRows), 0, stream>>>(moment);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
