// Products with one factor of a Kronecker product, many in one launch.
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// C = A B, for matrices B and C whose columns are pairs (outer, inner), the inner ones contiguous:
// column c of row t of B begins at t B_row + (c / inner) B_outer + c % inner. Strides in elements.
struct FactorProduct {
  const void* A;  // [rows, terms]
  const void* B;  // [terms, columns]
  void* C;        // [rows, columns]
  int64_t A_row, A_term;
  int64_t B_row, B_outer;
  int64_t C_row, C_outer;
  int rows, terms, columns, inner;
  int first_tile;
};

constexpr int kFactorTile = 64;  // rows and columns of C

inline int64_t factor_product_tiles(int64_t rows, int64_t columns) {
  const int64_t row_tiles = (rows + kFactorTile - 1) / kFactorTile;
  return row_tiles * ((columns + kFactorTile - 1) / kFactorTile);
}

// Types of the elements. Sums are in double for kDouble, else in float.
struct FactorProductTypes {
  ElementType A, B, C;
};

// All products. Either all three types are the same, or one of B and C is kFloat and the others are
// of 16 bits. Returns the launch error.
cudaError_t factor_products(const Table<FactorProduct>& products, const FactorProductTypes& types,
                            cudaStream_t stream);

}  // namespace torchium::cuda_kernels
