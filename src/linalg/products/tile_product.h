// The product of two parts of matrices, in the dtype and the precision of a chunked product.
#pragma once

#include "linalg/products/batched_products.h"
#include "linalg/products/product_tiles.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// Whether BLAS can read the matrices in place.
bool blas_readable(const at::Tensor& x);

// A contiguous tensor at the beginning of `buffer`, which is allocated if it is too small.
at::Tensor view_of(at::Tensor& buffer, at::IntArrayRef sizes, const at::TensorOptions& options);

// A part of A or B as the product reads it.
struct TileOperand {
  at::Tensor values;   // [b, rows, columns]; split: fp16 parts [2, rows, pitch]
  at::Tensor largest;  // split: the largest magnitude of each row of A or column of B
};

// Computes out = A B for parts of matrices on one device; bfloat16 and float16 in float32, rounded
// once.
class TileProduct {
 public:
  TileProduct(at::ScalarType dtype, c10::Device device, MatmulPrecision precision);

  // Multiplies float32 matrices as two fp16 parts each from now on, with tiles [rows, columns] and
  // k terms, if the device has the kernel and the work pays for splitting. Returns whether it does.
  bool split(int64_t rows, int64_t columns, int64_t k);
  void use_float32() { is_split_ = false; }
  bool is_split() const { return is_split_; }

  // Bytes of workspace. An operand on another device counts as a readable copy.
  TileBytes bytes(const at::Tensor& A, const at::Tensor& B) const;

  // The part [b, rows, columns] itself, or its copy in `buffer`.
  TileOperand row_operand(const at::Tensor& part_of_A, at::Tensor& buffer) const;
  TileOperand column_operand(const at::Tensor& part_of_B, at::Tensor& buffer) const;

  // out [b, rows, columns] has contiguous rows. With split operands b is 1.
  void multiply(at::Tensor& out, const TileOperand& A, const TileOperand& B);

  // Elements between rows of fp16 parts and of the product before it is copied.
  static int64_t pitch(int64_t columns) { return (columns + 7) / 8 * 8; }

 private:
  at::Tensor copied(const at::Tensor& part, at::Tensor& buffer) const;
  void multiply_into(at::Tensor& out, const at::Tensor& A, const at::Tensor& B) const;

  at::ScalarType dtype_, compute_dtype_, operand_dtype_;
  c10::Device device_;
  MatmulPrecision precision_;
  bool is_split_ = false;
  at::Tensor result_buffer_;
};

}  // namespace torchium::linalg::detail
