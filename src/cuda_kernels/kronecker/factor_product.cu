#include "cuda_kernels/common/element_access.cuh"
#include "cuda_kernels/kronecker/factor_product.h"

#include <cstdint>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTerms = 16;  // in shared memory at a time
constexpr int kPart = 4;    // rows and columns of C per thread
constexpr int kAcross = kFactorTile / kPart;
constexpr int kLoads = kFactorTile * kTerms / kThreads;  // per thread and operand
constexpr int kPadding = 1;                              // other banks for the rows of a column

static_assert(kAcross * kAcross == kThreads && kThreads % kFactorTile == 0);

__device__ int64_t column_offset(int column, int inner, int64_t outer_stride) {
  return column / inner * outer_stride + column % inner;
}

// One tile per thread block. Thread t sums the rows 4 (t / 16) + i and the columns t % 16 + 16 j.
template <typename Sum, typename TA, typename TB, typename TC, int bytes>
__global__ void __launch_bounds__(kThreads)
    factor_product_kernel(const __grid_constant__ Table<FactorProduct, bytes> products) {
  __shared__ Sum tile_A[kTerms][kFactorTile + kPadding];
  __shared__ Sum tile_B[kTerms][kFactorTile];
  const int tile = products.first_tile + static_cast<int>(blockIdx.x);
  const FactorProduct& product = entry_of_tile(products, tile);
  const int row_tiles = (product.rows + kFactorTile - 1) / kFactorTile;
  const int first_row = (tile - product.first_tile) % row_tiles * kFactorTile;
  const int first_column = (tile - product.first_tile) / row_tiles * kFactorTile;
  const auto* A = static_cast<const TA*>(product.A);
  const auto* B = static_cast<const TB*>(product.B);
  const int t = static_cast<int>(threadIdx.x);

  // Of the column of B that this thread loads.
  const int column_of_B = first_column + t % kFactorTile;
  const bool has_column = column_of_B < product.columns;
  const int64_t offset_in_B =
      has_column ? column_offset(column_of_B, product.inner, product.B_outer) : 0;

  Sum sum[kPart][kPart] = {};
  for (int begin = 0; begin < product.terms; begin += kTerms) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = t + i * kThreads;
      const int row = index / kTerms, term_of_A = index % kTerms;
      const bool in_A = first_row + row < product.rows && begin + term_of_A < product.terms;
      tile_A[term_of_A][row] =
          in_A ? static_cast<Sum>(
                     A[(first_row + row) * product.A_row + (begin + term_of_A) * product.A_term])
               : Sum(0);
      const int term_of_B = index / kFactorTile;
      const bool in_B = has_column && begin + term_of_B < product.terms;
      tile_B[term_of_B][t % kFactorTile] =
          in_B ? static_cast<Sum>(B[(begin + term_of_B) * product.B_row + offset_in_B]) : Sum(0);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTerms; ++k) {
      Sum a[kPart], b[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) a[i] = tile_A[k][t / kAcross * kPart + i];
#pragma unroll
      for (int j = 0; j < kPart; ++j) b[j] = tile_B[k][t % kAcross + kAcross * j];
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) sum[i][j] = fma(a[i], b[j], sum[i][j]);
      }
    }
    __syncthreads();
  }

  auto* C = static_cast<TC*>(product.C);
#pragma unroll
  for (int j = 0; j < kPart; ++j) {
    const int column = first_column + t % kAcross + kAcross * j;
    if (column >= product.columns) continue;
    const int64_t offset = column_offset(column, product.inner, product.C_outer);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const int row = first_row + t / kAcross * kPart + i;
      if (row < product.rows) C[row * product.C_row + offset] = static_cast<TC>(sum[i][j]);
    }
  }
}

template <typename Sum, typename TA, typename TB, typename TC>
cudaError_t launch_products(const Table<FactorProduct>& products, cudaStream_t stream) {
  return launch_shortest(products, [&](const auto& table) {
    factor_product_kernel<Sum, TA, TB, TC><<<table.tiles(), kThreads, 0, stream>>>(table);
  });
}

// Of 16 bits, into or from float.
template <typename Half>
cudaError_t launch_half(const Table<FactorProduct>& products, bool from_float,
                        cudaStream_t stream) {
  return from_float ? launch_products<float, Half, float, Half>(products, stream)
                    : launch_products<float, Half, Half, float>(products, stream);
}

}  // namespace

cudaError_t factor_products(const Table<FactorProduct>& products, const FactorProductTypes& types,
                            cudaStream_t stream) {
  const bool from_float = types.B == ElementType::kFloat;
  switch (types.A) {
    case ElementType::kFloat:
      return launch_products<float, float, float, float>(products, stream);
    case ElementType::kDouble:
      return launch_products<double, double, double, double>(products, stream);
    case ElementType::kBFloat16:
      return launch_half<__nv_bfloat16>(products, from_float, stream);
    case ElementType::kHalf:
      return launch_half<__half>(products, from_float, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torchium::cuda_kernels
