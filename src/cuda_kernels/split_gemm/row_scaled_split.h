// Operands of a float32 product whose rows or columns differ in magnitude, as fp16 parts
// (split_fp16.h): each row of A and each column of B has a scale of its own, so that an error is
// relative to them and not to the whole matrix.
#pragma once

#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// x[r, c] is at data + r row_stride + c column_stride. Fast if one of the strides is 1.
struct FloatMatrix {
  const float* data;
  int64_t rows, columns;
  int64_t row_stride, column_stride;
};

// Raises largest[r] to the largest magnitude of row r, or with by_columns of each column; NaN
// counts as larger than Inf. `largest` begins with zeros.
cudaError_t find_largest(const FloatMatrix& x, bool by_columns, float* largest,
                         cudaStream_t stream);

// Writes hi and lo, [rows, pitch] each with zeros behind the columns; pitch is a multiple of 8.
// largest: the largest magnitude of each row, or with by_columns of each column. A row with Inf or
// NaN has parts that are not finite.
struct ScaledSplit {
  FloatMatrix x;
  const float* largest;
  bool by_columns;
  __half *hi, *lo;
  int64_t pitch;
};

cudaError_t split_scaled(const ScaledSplit& split, cudaStream_t stream);

// out[r, c] <- C[r, c] without the scales of row r of A and column c of B. C is [rows, pitch]; out
// has contiguous rows and may be C.
struct ScaledResult {
  const float* C;
  int64_t pitch;
  const float *largest_A, *largest_B;
  float* out;
  int64_t rows, columns, row_stride;
};

cudaError_t remove_scales(const ScaledResult& result, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
