// Batched matrix products of any shape on Hopper's tensor cores, many batches in one launch.
// Operands are fp16 parts (split_fp16.h), results float32.
#pragma once

#include "cuda_kernels/split_gemm/split_fp16.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

enum class ProductKind : uint8_t {
  kRowGram,      // A A^T
  kColumnGram,   // A^T A
  kGeneral,      // A B
  kBySymmetric,  // A B, B symmetric
  // Only for kernels of their own:
  kRowProduct,  // A B^T
  kGramParts,   // parts of A A^T: part i sums the terms from i K to (i + 1) K - 1
};

// C <- A B for each matrix of a batch. Gram matrices: C <- beta C + alpha A A^T, where only tiles
// on and below the diagonal are read and computed, and C becomes exactly symmetric. C is
// contiguous, and finite even if beta = 0. C and the rows of A and B begin at multiples of 16
// bytes.
struct BatchedProduct {
  SplitFp16 A, B;  // B is not used for Gram matrices
  float* C;
  int64_t matrices;
  // Raised to the largest magnitude of C, as bits; null: not computed. Not for Gram matrices.
  unsigned* largest = nullptr;
};

// Factors of a Gram matrix update, for all batches. alpha excludes the scales of fp16 parts.
struct GramUpdate {
  float alpha, beta;
};

// Whether this build and the device have the kernel.
bool has_batched_product(int major, int minor, int shared_bytes);

// For blocks with these numbers of rows and columns: rows of operands and Gram matrices must begin
// at multiples of 16 bytes.
inline bool fits_batched_product(int64_t rows, int64_t columns) {
  return rows > 0 && columns > 0 && rows % 8 == 0 && columns % 8 == 0;
}

// What batched_products() does: floating point operations of the tensor cores, three products of
// parts without `single`, and bytes of operands and results, each once.
struct ProductWork {
  int64_t flops = 0, bytes = 0;
};
ProductWork work_of(ProductKind kind, const BatchedProduct* products, int count, bool single);

// All `count` products. update: on the device, for Gram matrices only. single: lo parts count as
// zero, for a third of the arithmetic. Returns the launch error.
cudaError_t batched_products(ProductKind kind, const BatchedProduct* products, int count,
                             const GramUpdate* update, bool single, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
