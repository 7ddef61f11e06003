#include "cuda_kernels/common/hopper.h"
#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/split_gemm/batched_product.h"
#include "cuda_kernels/split_gemm/batched_product_block.cuh"
#include "cuda_kernels/split_gemm/batched_product_consumer.cuh"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

using namespace batched_product_detail;

template <ProductKind kind, bool single>
__global__ void __launch_bounds__(Layout<kind, single>::kThreads, Layout<kind, single>::kBlocks)
    batched_product_kernel(const __grid_constant__ ProductTable table) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  const Shared<kind, single> shared(memory);
  if (threadIdx.x == 0) shared.initialize();
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    if constexpr (!single) take_registers<240>();
    Consumer<kind, single>(shared).run(table);
  } else {
    if constexpr (!single) give_registers<24>();
    if (threadIdx.x == kConsumers) Loader<kind, single>(shared).run(table);
  }
#endif
}

struct Sizes {
  int M, N, K;
};

Sizes sizes_of(ProductKind kind, const BatchedProduct& product) {
  const SplitFp16 &A = product.A, &B = product.B;
  switch (kind) {
    case ProductKind::kRowGram:
      return {A.rows, A.rows, A.columns};
    case ProductKind::kColumnGram:
      return {A.columns, A.columns, A.rows};
    default:
      return {A.rows, B.columns, A.columns};
  }
}

cudaError_t add_product(ProductKind kind, const BatchedProduct& product, ProductTable& table) {
  const auto [M, N, K] = sizes_of(kind, product);
  ProductEntry& entry = table.entries[table.count++];
  entry.scale_A = product.A.scale;
  entry.scale_B = product.B.scale;
  entry.has_scales_A = product.A.has_scales;
  entry.has_scales_B = product.B.has_scales;
  entry.C = product.C;
  entry.largest = product.largest;
  entry.M = M;
  entry.N = N;
  entry.K = K;
  entry.first_tile = table.tiles;
  entry.tiles_of_matrix = tiles_of_matrix(kind, M, N);
  table.tiles += static_cast<int>(product.matrices * entry.tiles_of_matrix);
  const cudaError_t error = make_tile_map(product.A, product.matrices, entry.A);
  return error != cudaSuccess || is_gram(kind)
             ? error
             : make_tile_map(product.B, product.matrices, entry.B);
}

constexpr int kMostSharedBytes = std::max(Layout<ProductKind::kRowGram, true>::kSharedBytes,
                                          Layout<ProductKind::kRowGram, false>::kSharedBytes);

template <ProductKind kind, bool single>
cudaError_t launch(const ProductTable& table, cudaStream_t stream) {
  constexpr int kSharedBytes = Layout<kind, single>::kSharedBytes;
  const auto kernel = batched_product_kernel<kind, single>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  int processors = 0;
  error = count_processors(processors);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(table.tiles, Layout<kind, single>::kBlocks * processors);
  kernel<<<blocks, Layout<kind, single>::kThreads, kSharedBytes, stream>>>(table);
  return cudaGetLastError();
}

template <bool single>
cudaError_t launch(ProductKind kind, const ProductTable& table, cudaStream_t stream) {
  switch (kind) {
    case ProductKind::kRowGram:
      return launch<ProductKind::kRowGram, single>(table, stream);
    case ProductKind::kColumnGram:
      return launch<ProductKind::kColumnGram, single>(table, stream);
    case ProductKind::kGeneral:
      return launch<ProductKind::kGeneral, single>(table, stream);
    default:
      return launch<ProductKind::kBySymmetric, single>(table, stream);
  }
}

}  // namespace

bool has_batched_product(int major, int minor, int shared_bytes) {
  return has_hopper_kernel(major, minor, shared_bytes, kMostSharedBytes);
}

ProductWork work_of(ProductKind kind, const BatchedProduct* products, int count, bool single) {
  const int64_t parts = single ? 1 : 2, part_products = single ? 1 : 3;
  constexpr int64_t kHalfBytes = 2, kFloatBytes = 4;
  ProductWork work;
  for (int i = 0; i < count; ++i) {
    const auto [M, N, K] = sizes_of(kind, products[i]);
    const int64_t results = is_gram(kind) ? int64_t{M} * (M + 1) / 2 : int64_t{M} * N;
    const int64_t operands = int64_t{M} * K + (is_gram(kind) ? 0 : int64_t{K} * N);
    work.flops += products[i].matrices * part_products * 2 * results * K;
    work.bytes += products[i].matrices * (kHalfBytes * parts * operands +
                                          kFloatBytes * int64_t{M} * N * (is_gram(kind) ? 2 : 1));
  }
  return work;
}

cudaError_t batched_products(ProductKind kind, const BatchedProduct* products, int count,
                             const GramUpdate* update, bool single, cudaStream_t stream) {
  for (int begin = 0; begin < count; begin += ProductTable::kCapacity) {
    ProductTable table;
    table.update = update;
    const int end = std::min(count, begin + ProductTable::kCapacity);
    for (int i = begin; i < end; ++i) {
      const cudaError_t error = add_product(kind, products[i], table);
      if (error != cudaSuccess) return error;
    }
    const cudaError_t error =
        single ? launch<true>(kind, table, stream) : launch<false>(kind, table, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace torchium::cuda_kernels
