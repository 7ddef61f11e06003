#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/factors/moment_parts.cuh"
#include "cuda_kernels/factors/second_moment.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kTile = 32;
constexpr int kThreadRows = 8;
constexpr int kFewBlocks = 128;  // with a thread for each element
constexpr int kLargeTile = 64;
constexpr int kLargeThreads = 256;
constexpr int kLargeOrder = 1024;

// Element (i, j) of X X^T, from a moment_product().
class Parts {
 public:
  explicit Parts(const MomentParts& parts) : share_(parts.share), series_(parts.series[0]) {}

  __device__ float operator()(const SecondMoment& moment, int i, int j) {
    constexpr int kSize = MomentParts::kTile;
    const int row = max(i, j), column = min(i, j);
    find(moment.product, row / kSize, column / kSize);
    return sum_of_parts(first_ + row % kSize * kSize + column % kSize, count_);
  }

 private:
  // The next element is mostly in the same tile.
  __device__ void find(const float* workspace, int row, int column) {
    if (row == row_ && column == column_) return;
    row_ = row;
    column_ = column;
    const MomentTile tile = moment_tile(series_, row, column);
    const PartRange range = parts_of(series_, tile, share_);
    first_ = first_part(workspace, series_, tile, range);
    count_ = range.last - range.first + 1;
  }

  int share_, row_ = -1, column_ = -1, count_ = 0;
  TileSeries series_;
  const float* first_ = nullptr;
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
__global__ void __launch_bounds__(kTile* kTile, 1)
    store_kernel(const SecondMoment moment, Product product) {
  __shared__ float values[kTile][kTile + 1];
  const TriangleTile tile(static_cast<int>(blockIdx.x));
  const int top = tile.row * kTile, left = tile.column * kTile;
  const int order = moment.order, written = written_rows(moment);
  float* target = moment.target + int64_t{blockIdx.y} * order * order;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += blockDim.y) {
    const int i = top + y, j = left + x;
    if (i >= written || j > i) continue;
    float* place = target + int64_t{i} * order + j;
    const float value =
        element<vectors>(moment, product, i, j) + (moment.accumulate ? *place : 0.0f);
    *place = value;
    values[y][x] = value;
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += blockDim.y) {
    const int i = left + y, j = top + x;
    if (j < written && i < j) target[int64_t{i} * order + j] = values[x][y];
  }
}

// The same for vectors in the order of the weight, from parts, in larger tiles. Each lies in one
// tile of the product.
__global__ void __launch_bounds__(kLargeThreads)
    store_large_kernel(const SecondMoment moment, const TileSeries series, int share) {
  constexpr int kSize = MomentParts::kTile, kVectors = kLargeTile / 4;
  static_assert(kSize % kLargeTile == 0 && kLargeThreads % kLargeTile == 0);
  __shared__ float values[kLargeTile][kLargeTile + 1];
  const TriangleTile tile(static_cast<int>(blockIdx.x));
  const int top = tile.row * kLargeTile, left = tile.column * kLargeTile;
  const int thread = static_cast<int>(threadIdx.x);
  const int n = moment.n, order = moment.order, written = written_rows(moment);
  if (top < n) {
    const MomentTile product = moment_tile(series, top / kSize, left / kSize);
    const PartRange range = parts_of(series, product, share);
    const float* first =
        first_part(moment.product, series, product, range) + top % kSize * kSize + left % kSize;
    const int count = range.last - range.first + 1, column = thread % kVectors * 4;
    for (int y = thread / kVectors; y < kLargeTile; y += kLargeThreads / kVectors) {
      const float4 sum = sum_of_vectors(first + y * kSize + column, count);
      values[y][column] = sum.x;
      values[y][column + 1] = sum.y;
      values[y][column + 2] = sum.z;
      values[y][column + 3] = sum.w;
    }
  }
  __syncthreads();
  if (n < written && top <= n && n < top + kLargeTile && thread < kLargeTile) {
    Whole none;
    const int j = left + thread;
    if (j <= n) values[n - top][thread] = element<VectorOrder::kOfWeight>(moment, none, n, j);
  }
  __syncthreads();
  const int x = thread % kLargeTile, begin = thread / kLargeTile;
  constexpr int kStep = kLargeThreads / kLargeTile;
  for (int y = begin; y < kLargeTile; y += kStep) {
    const int i = top + y, j = left + x;
    if (i >= written || j > i) continue;
    float* place = moment.target + int64_t{i} * order + j;
    const float value = values[y][x] + (moment.accumulate ? *place : 0.0f);
    *place = value;
    values[y][x] = value;
  }
  __syncthreads();
  for (int y = begin; y < kLargeTile; y += kStep) {
    const int i = left + y, j = top + x;
    if (j < written && i < j) moment.target[int64_t{i} * order + j] = values[x][y];
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
  const int rows = blocks.x * blocks.y <= kFewBlocks ? kTile : kThreadRows;
  kernel<<<blocks, dim3(kTile, rows), 0, stream>>>(moment, product);
  return cudaGetLastError();
}

}  // namespace

cudaError_t store_second_moment(const SecondMoment& moment, cudaStream_t stream) {
  if (moment.parts == nullptr) return launch(moment, Whole{}, stream);
  if (moment.vectors != VectorOrder::kOfWeight || moment.n < kLargeOrder) {
    return launch(moment, Parts(*moment.parts), stream);
  }
  const int blocks = triangle_tiles((written_rows(moment) + kLargeTile - 1) / kLargeTile);
  store_large_kernel<<<blocks, kLargeThreads, 0, stream>>>(moment, moment.parts->series[0],
                                                           moment.parts->share);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
