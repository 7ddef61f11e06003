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
    find(row / kSize, column / kSize);
    return sum_of_parts(moment.product, series_, tile_, range_,
                        row % kSize * kSize + column % kSize);
  }

 private:
  // The next element is mostly in the same tile.
  __device__ void find(int row, int column) {
    if (row == tile_.row && column == tile_.column) return;
    tile_ = moment_tile(series_, row, column);
    range_ = parts_of(series_, tile_, share_);
  }

  int share_;
  TileSeries series_;
  MomentTile tile_{-1, -1, -1, 0, 0};
  PartRange range_{};
};

// The same from a matrix.
struct Whole {
  __device__ float operator()(const SecondMoment& moment, int i, int j) const {
    return moment.product[(int64_t{blockIdx.y} * moment.pitch + i) * moment.pitch + j];
  }
};

// Where element i of the target is in a vector.
template <VectorOrder order>
__device__ int place_of(const SecondMoment& moment, int i) {
  if constexpr (order == VectorOrder::kPixels) {
    return i % moment.pixels * (moment.n / moment.pixels) + i / moment.pixels;
  }
  if constexpr (order == VectorOrder::kFolded) {
    constexpr int kRow = FoldedImages::kMostPixels * FoldedImages::kElements;
    const int channels = moment.n / moment.pixels;
    const int channel = i / moment.pixels, pixel = i % moment.pixels;
    const int y = pixel / moment.x.kernel + moment.y.offset;
    const int x = pixel % moment.x.kernel + moment.x.offset;
    const int in_folded = y % moment.y.stride * moment.x.stride + x % moment.x.stride;
    return y / moment.y.stride * kRow + x / moment.x.stride * FoldedImages::kElements +
           in_folded * channels + channel;
  }
  return i;
}

// Element (i, j) of the target; j <= i.
template <VectorOrder order, typename Product>
__device__ float element(const SecondMoment& moment, Product& product, int i, int j) {
  const int n = moment.n;
  if (i < n) {
    return product(moment, place_of<order>(moment, i), place_of<order>(moment, j));
  }
  if (j == n) return moment.count;
  float sum = 0;
#pragma unroll 8
  for (int part = 0; part < moment.sum_parts; ++part) {
    const int64_t row = int64_t{part} * moment.groups + blockIdx.y;
    sum += moment.sums[row * moment.pitch + place_of<order>(moment, j)];
  }
  return sum;
}

__host__ __device__ int written_rows(const SecondMoment& moment) {
  return moment.n + (moment.sums == nullptr ? 0 : 1);
}

// One tile on or below the diagonal, and its mirror image.
template <VectorOrder vectors, typename Product>
__global__ void __launch_bounds__(kTile* kThreadRows)
    store_kernel(const SecondMoment moment, Product product) {
  __shared__ float values[kTile][kTile + 1];
  const TriangleTile tile(static_cast<int>(blockIdx.x));
  const int top = tile.row * kTile, left = tile.column * kTile;
  const int order = moment.order, written = written_rows(moment);
  float* target = moment.target + int64_t{blockIdx.y} * order * order;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kThreadRows) {
    const int i = top + y, j = left + x;
    if (i >= written || j > i) continue;
    float* place = target + int64_t{i} * order + j;
    const float value =
        element<vectors>(moment, product, i, j) + (moment.accumulate ? *place : 0.0f);
    *place = value;
    values[y][x] = value;
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kThreadRows) {
    const int i = left + y, j = top + x;
    if (j < written && i < j) target[int64_t{i} * order + j] = values[x][y];
  }
}

template <typename Product>
cudaError_t launch(const SecondMoment& moment, const Product& product, cudaStream_t stream) {
  const dim3 blocks(triangle_tiles((written_rows(moment) + kTile - 1) / kTile), moment.groups);
  if (blocks.x == 0 || blocks.y == 0) return cudaSuccess;
  const auto kernel =
      moment.vectors == VectorOrder::kOfWeight ? store_kernel<VectorOrder::kOfWeight, Product>
      : moment.vectors == VectorOrder::kPixels ? store_kernel<VectorOrder::kPixels, Product>
                                               : store_kernel<VectorOrder::kFolded, Product>;
  kernel<<<blocks, dim3(kTile, kThreadRows), 0, stream>>>(moment, product);
  return cudaGetLastError();
}

}  // namespace

cudaError_t store_second_moment(const SecondMoment& moment, cudaStream_t stream) {
  return moment.parts == nullptr ? launch(moment, Whole{}, stream)
                                 : launch(moment, Parts(*moment.parts), stream);
}

}  // namespace torchium::cuda_kernels
