#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/factors/moment_parts.cuh"
#include "cuda_kernels/factors/second_moment.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kTile = 32;
constexpr int kThreadRows = 8;

// Element (i, j) of X X^T, from a moment_product().
class Parts {
 public:
  explicit Parts(const MomentParts& parts) : share_(parts.share), series_(parts.series[0]) {}

  __device__ float operator()(const SecondMoment& moment, int i, int j) {
    constexpr int kSize = MomentParts::kTile;
    const int row = max(i, j), column = min(i, j);
    find(triangle_tiles(row / kSize) + column / kSize);
    return sum_of_parts(moment.product, tile_, range_, row % kSize * kSize + column % kSize);
  }

 private:
  // The next element is mostly in the same tile.
  __device__ void find(int tile) {
    if (tile == tile_) return;
    tile_ = tile;
    range_ = parts_of_tile(series_, share_, tile);
  }

  int share_, tile_ = -1;
  TileSeries series_;
  PartRange range_{};
};

// The same from a matrix.
struct Whole {
  __device__ float operator()(const SecondMoment& moment, int i, int j) const {
    return moment.product[(int64_t{blockIdx.y} * moment.pitch + i) * moment.pitch + j];
  }
};

// Element (i, j) of the target; j <= i.
template <bool permuted, typename Product>
__device__ float element(const SecondMoment& moment, Product& product, int i, int j) {
  const int n = moment.n;
  const auto place = [&](int k) {
    if constexpr (permuted) return k % moment.pixels * (n / moment.pixels) + k / moment.pixels;
    return k;
  };
  if (i < n) return product(moment, place(i), place(j));
  if (j == n) return moment.count;
  float sum = 0;
#pragma unroll 8
  for (int part = 0; part < moment.sum_parts; ++part) {
    const int64_t row = int64_t{part} * moment.groups + blockIdx.y;
    sum += moment.sums[row * moment.pitch + place(j)];
  }
  return sum;
}

// One tile on or below the diagonal, and its mirror image.
template <bool permuted, typename Product>
__global__ void __launch_bounds__(kTile* kThreadRows)
    store_kernel(const SecondMoment moment, Product product) {
  __shared__ float values[kTile][kTile + 1];
  const TriangleTile tile(static_cast<int>(blockIdx.x));
  const int top = tile.row * kTile, left = tile.column * kTile;
  const int order = moment.n + (moment.sums == nullptr ? 0 : 1);
  float* target = moment.target + int64_t{blockIdx.y} * order * order;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kThreadRows) {
    const int i = top + y, j = left + x;
    if (i >= order || j > i) continue;
    float* place = target + int64_t{i} * order + j;
    const float value =
        element<permuted>(moment, product, i, j) + (moment.accumulate ? *place : 0.0f);
    *place = value;
    values[y][x] = value;
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kThreadRows) {
    const int i = left + y, j = top + x;
    if (j < order && i < j) target[int64_t{i} * order + j] = values[x][y];
  }
}

template <typename Product>
cudaError_t launch(const SecondMoment& moment, const Product& product, cudaStream_t stream) {
  const int order = moment.n + (moment.sums == nullptr ? 0 : 1);
  const dim3 blocks(triangle_tiles((order + kTile - 1) / kTile), moment.groups);
  if (blocks.x == 0 || blocks.y == 0) return cudaSuccess;
  const auto kernel =
      moment.pixels == 1 ? store_kernel<false, Product> : store_kernel<true, Product>;
  kernel<<<blocks, dim3(kTile, kThreadRows), 0, stream>>>(moment, product);
  return cudaGetLastError();
}

}  // namespace

cudaError_t store_second_moment(const SecondMoment& moment, cudaStream_t stream) {
  return moment.parts == nullptr ? launch(moment, Whole{}, stream)
                                 : launch(moment, Parts(*moment.parts), stream);
}

}  // namespace torchium::cuda_kernels
