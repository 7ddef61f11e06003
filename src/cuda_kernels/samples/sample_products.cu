#include "cuda_kernels/common/hopper.h"
#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/samples/sample_products.h"
#include "cuda_kernels/split_gemm/batched_product_block.cuh"
#include "cuda_kernels/split_gemm/batched_product_consumer.cuh"

#include <algorithm>
#include <cmath>

namespace torchium::cuda_kernels {
namespace {

using namespace batched_product_detail;

enum class Result : uint8_t { kRows, kParts, kSquares };

constexpr ProductKind kProduct = ProductKind::kRowProduct;  // A: output gradients, B: inputs
constexpr ProductKind kGram = ProductKind::kGramParts;
constexpr int kSquaresOfTile = kConsumers / 32;

// What becomes of the tiles of the products.
struct Target {
  float* rows;
  const float* weights;
  __half *hi, *lo;
  int pitch;
  float* squares;
  int groups;
  float down;  // 2^-e of scale_of_positions()
};

struct SampleTable {
  ProductTableOf<1> products;
  Target target;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Transposes a 4 x 4 matrix of which each lane of a group of four holds a column: x[i] of lane j
// becomes x[j] of lane i.
__device__ void transpose_in_four(uint32_t (&x)[4], int lane) {
  const bool is_odd = lane % 2 != 0, is_upper = lane % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, is_odd ? x[i] : x[i + 1], 1);
    (is_odd ? x[i] : x[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, is_upper ? x[i] : x[i + 2], 2);
    (is_upper ? x[i] : x[i + 2]) = other;
  }
}

template <Result result>
class SampleConsumer : public Consumer<kProduct, false> {
 public:
  using Base = Consumer<kProduct, false>;
  using Base::Base;

  __device__ void run(const SampleTable& table) {
    for_each_tile<kProduct>(table.products, [&](const Tile<kProduct>& tile) {
      float sum[64];
      this->accumulate(tile, sum);
      if constexpr (result == Result::kRows) store_rows(tile, table.target, sum);
      if constexpr (result == Result::kParts) store_parts(tile, table.target, sum);
      if constexpr (result == Result::kSquares) store_squares(tile, table.target, sum);
    });
  }

 private:
  __device__ void store_rows(const Tile<kProduct>& tile, const Target& target,
                             const float (&x)[64]) const {
    const ProductEntry& product = tile.product;
    const int sample = tile.matrix / target.groups;
    const double scale =
        static_cast<double>(product.scale_A[sample]) * static_cast<double>(product.scale_B[sample]);
    const typename Base::Factors factors(1 / scale, 0);
    const float weight = target.weights == nullptr ? 1.0f : target.weights[sample];
    const int M = product.M, N = product.N;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = this->first_row(tile) + 8 * h;
      float* C = target.rows + (int64_t{tile.matrix} * M + row) * N;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int column = this->first_column(tile) + 8 * j;
        if (row >= M || column >= N) continue;
        const float first = weight * factors.scaled(x[4 * j + 2 * h]);
        const float second = weight * factors.scaled(x[4 * j + 2 * h + 1]);
        if (N % 2 == 0) {
          *reinterpret_cast<float2*>(C + column) = {first, second};
        } else {
          C[column] = first;
          if (column + 1 < N) C[column + 1] = second;
        }
      }
    }
  }

  // Four lanes have eight columns of a row in pairs. They exchange those of four times eight
  // columns, so that each stores eight at once.
  __device__ void store_parts(const Tile<kProduct>& tile, const Target& target,
                              const float (&x)[64]) const {
    const int M = tile.product.M;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = this->first_row(tile) + 8 * h;
      const int64_t begin = (int64_t{tile.matrix} * M + row) * target.pitch;
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          split_pair(x[4 * (j + i) + 2 * h] * target.down, x[4 * (j + i) + 2 * h + 1] * target.down,
                     high[i], low[i]);
        }
        transpose_in_four(high, this->lane_);
        transpose_in_four(low, this->lane_);
        const int column = tile.column + 8 * (j + this->lane_ % 4);
        if (row >= M || column >= target.pitch) continue;
        *reinterpret_cast<uint4*>(target.hi + begin + column) = {high[0], high[1], high[2],
                                                                 high[3]};
        *reinterpret_cast<uint4*>(target.lo + begin + column) = {low[0], low[1], low[2], low[3]};
      }
    }
  }

  // Elements outside of the matrix are zero.
  __device__ void store_squares(const Tile<kProduct>& tile, const Target& target,
                                const float (&x)[64]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const float element = x[i] * target.down;
      sum = fmaf(element, element, sum);
    }
    sum = warp_sum(sum);
    const int64_t index = int64_t{tile.matrix} * tile.product.tiles_of_matrix + tile.index;
    if (this->lane_ == 0) {
      target.squares[index * kSquaresOfTile + this->group_ * 4 + this->warp_] = sum;
    }
  }
};

// Stores the parts of the sums as matrices of whole tiles.
class GramConsumer : public Consumer<kGram, false> {
 public:
  using Base = Consumer<kGram, false>;
  using Base::Base;

  __device__ void run(const ProductTableOf<1>& table) {
    for_each_tile<kGram>(table, [&](const Tile<kGram>& tile) {
      float sum[64];
      this->accumulate(tile, sum);
      const int64_t order = int64_t{tiles_along(tile.product.M)} * kTile;
      float* C = tile.product.C + tile.matrix * order * order;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* row = C + (this->first_row(tile) + 8 * h) * order + this->first_column(tile);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          *reinterpret_cast<float2*>(row + 8 * j) = {sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]};
        }
      }
    });
  }
};

#endif

constexpr int kThreads = Layout<kProduct, false>::kThreads;
constexpr int kSharedBytes = Layout<kProduct, false>::kSharedBytes;
static_assert(kThreads == Layout<kGram, false>::kThreads &&
              kSharedBytes == Layout<kGram, false>::kSharedBytes);

template <Result result>
__global__ void __launch_bounds__(kThreads, 1)
    sample_product_kernel(const __grid_constant__ SampleTable table) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  const Shared<kProduct, false> shared(memory);
  if (threadIdx.x == 0) shared.initialize();
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    take_registers<240>();
    SampleConsumer<result>(shared).run(table);
  } else {
    give_registers<24>();
    if (threadIdx.x == kConsumers) Loader<kProduct, false>(shared).run(table.products);
  }
#endif
}

__global__ void __launch_bounds__(kThreads, 1)
    sample_gram_kernel(const __grid_constant__ ProductTableOf<1> table) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  const Shared<kGram, false> shared(memory);
  if (threadIdx.x == 0) shared.initialize();
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    take_registers<240>();
    GramConsumer(shared).run(table);
  } else {
    give_registers<24>();
    if (threadIdx.x == kConsumers) Loader<kGram, false>(shared).run(table);
  }
#endif
}

constexpr int kSumColumns = 32;
constexpr int kSumRows = 8;

// One element per thread, of the parts and then in K and its mirror image.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_parts_kernel(const SampleGram gram, const float* parts, int order) {
  const int i = static_cast<int>(blockIdx.y) * kSumRows + static_cast<int>(threadIdx.y);
  const int j = static_cast<int>(blockIdx.x) * kSumColumns + static_cast<int>(threadIdx.x);
  const int n = gram.J.rows;
  if (i >= n || j > i) return;
  const float* part = parts + int64_t{i} * order + j;
  double sum = 0;
#pragma unroll 8
  for (int k = 0; k < gram.parts; ++k) sum += part[int64_t{k} * order * order];
  const auto scale = [&](int sample) {
    return static_cast<double>(gram.scale_A[sample]) * static_cast<double>(gram.scale_G[sample]);
  };
  double* place = gram.K + int64_t{i} * n + j;
  const double value = *place + gram.factor * (sum / scale(i) / scale(j));
  *place = value;
  gram.K[int64_t{j} * n + i] = value;
}

// The least e with positions <= 2^e, and that of the scales of two operands.
int exponent_of(int positions) {
  int exponent = 15;
  while (int64_t{1} << (exponent - 15) < positions) ++exponent;
  return exponent;
}

template <typename Kernel, typename Table>
cudaError_t launch(Kernel kernel, const Table& table, int tiles, cudaStream_t stream) {
  int processors = 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) error = count_processors(processors);
  if (error != cudaSuccess || tiles == 0) return error;
  kernel<<<std::min(tiles, processors), kThreads, kSharedBytes, stream>>>(table);
  return cudaGetLastError();
}

template <Result result>
cudaError_t launch_product(const SampleProduct& product, const Target& target,
                           cudaStream_t stream) {
  SampleTable table;
  table.target = target;
  table.target.groups = product.groups;
  table.target.down = std::ldexp(1.0f, -exponent_of(product.positions));
  const int64_t matrices = int64_t{product.samples} * product.groups;
  SplitFp16 G = product.G;
  const int64_t of_matrix = int64_t{G.rows} * G.columns;
  G.hi += int64_t{product.first_output} * G.columns;
  G.lo += int64_t{product.first_output} * G.columns;
  G.rows = product.outputs;
  ProductEntry& entry = table.products.entries[0];
  entry.scale_A = G.scale;
  entry.scale_B = product.A.scale;
  entry.M = product.outputs;
  entry.N = product.A.rows;
  entry.K = product.A.columns;
  entry.first_tile = 0;
  entry.tiles_of_matrix = tiles_of_matrix(kProduct, entry.M, entry.N);
  table.products.count = 1;
  table.products.tiles = static_cast<int>(matrices * entry.tiles_of_matrix);
  cudaError_t error = make_tile_map(G, matrices, entry.A, of_matrix);
  if (error == cudaSuccess) error = make_tile_map(product.A, matrices, entry.B);
  if (error != cudaSuccess) return error;
  return launch(sample_product_kernel<result>, table, table.products.tiles, stream);
}

}  // namespace

bool has_sample_products(int major, int minor, int shared_bytes) {
  return has_hopper_kernel(major, minor, shared_bytes, kSharedBytes);
}

double scale_of_positions(int positions) { return std::ldexp(1.0, exponent_of(positions)); }

cudaError_t sample_rows(const SampleProduct& product, const float* weights, float* rows,
                        cudaStream_t stream) {
  Target target{};
  target.rows = rows;
  target.weights = weights;
  return launch_product<Result::kRows>(product, target, stream);
}

cudaError_t sample_parts(const SampleProduct& product, __half* hi, __half* lo, int pitch,
                         cudaStream_t stream) {
  Target target{};
  target.hi = hi;
  target.lo = lo;
  target.pitch = pitch;
  return launch_product<Result::kParts>(product, target, stream);
}

int squares_of_sample(const SampleProduct& product) {
  return product.groups * tiles_of_matrix(kProduct, product.outputs, product.A.rows) *
         kSquaresOfTile;
}

cudaError_t sample_squares(const SampleProduct& product, float* tiles, cudaStream_t stream) {
  Target target{};
  target.squares = tiles;
  return launch_product<Result::kSquares>(product, target, stream);
}

cudaError_t plan_sample_gram(SampleGram& gram, int64_t& elements) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  if (error != cudaSuccess) return error;
  constexpr int kLeastStages = 8;  // of a part: fewer take longer to add up than they save
  const int rows = tiles_along(gram.J.rows), tiles = triangle_tiles(rows);
  const int stages = (gram.J.columns + kBoxElements - 1) / kBoxElements;
  const int most = std::max(1, std::min(processors / tiles, stages / kLeastStages));
  const int of_part = (stages + most - 1) / most;
  gram.parts = (stages + of_part - 1) / of_part;
  gram.part_terms = of_part * kBoxElements;
  const int64_t order = int64_t{rows} * kTile;
  elements = gram.parts * order * order;
  return cudaSuccess;
}

cudaError_t sample_gram(const SampleGram& gram, float* workspace, cudaStream_t stream) {
  ProductTableOf<1> table;
  ProductEntry& entry = table.entries[0];
  entry.C = workspace;
  entry.M = entry.N = gram.J.rows;
  entry.K = gram.part_terms;
  entry.terms = gram.J.columns;
  entry.first_tile = 0;
  entry.tiles_of_matrix = tiles_of_matrix(kGram, entry.M, entry.N);
  table.count = 1;
  table.tiles = gram.parts * entry.tiles_of_matrix;
  cudaError_t error = make_tile_map(gram.J, 1, entry.A);
  if (error == cudaSuccess) error = launch(sample_gram_kernel, table, table.tiles, stream);
  if (error != cudaSuccess || gram.J.rows == 0) return error;
  const int n = gram.J.rows, order = tiles_along(n) * kTile;
  const dim3 blocks((n + kSumColumns - 1) / kSumColumns, (n + kSumRows - 1) / kSumRows);
  sum_parts_kernel<<<blocks, dim3(kSumColumns, kSumRows), 0, stream>>>(gram, workspace, order);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
