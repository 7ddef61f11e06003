#include "linalg/products/tile_product.h"

#include "linalg/products/split_product.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace torchium::linalg::detail {
namespace {

bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

}  // namespace

bool blas_readable(const at::Tensor& x) {
  const auto rows = x.size(-2), columns = x.size(-1);
  return (x.stride(-1) == 1 && x.stride(-2) >= std::max<int64_t>(1, columns)) ||
         (x.stride(-2) == 1 && x.stride(-1) >= std::max<int64_t>(1, rows));
}

at::Tensor view_of(at::Tensor& buffer, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto numel = c10::multiply_integers(sizes);
  if (!buffer.defined() || buffer.numel() < numel) buffer = at::empty({numel}, options);
  return buffer.narrow(0, 0, numel).view(sizes);
}

TileProduct::TileProduct(at::ScalarType dtype, c10::Device device, MatmulPrecision precision)
    : dtype_(dtype),
      compute_dtype_(is_narrow(dtype) ? at::kFloat : dtype),
      // cuBLAS multiplies half-precision operands into float32 results itself.
      operand_dtype_(device.is_cuda() ? dtype : compute_dtype_),
      device_(device),
      precision_(precision) {}

bool TileProduct::split(int64_t rows, int64_t columns, int64_t k) {
  is_split_ = dtype_ == at::kFloat && precision_ == MatmulPrecision::kHighest &&
              split_product_pays(device_, rows, columns, k);
  return is_split_;
}

TileBytes TileProduct::bytes(const at::Tensor& A, const at::Tensor& B) const {
  const int64_t k = A.size(-1);
  if (is_split_) {
    const int64_t part = 2 * static_cast<int64_t>(c10::elementSize(at::kHalf));
    const int64_t largest = sizeof(float);
    return {part * pitch(k) + largest, part * k + largest, sizeof(float)};
  }
  const auto element = static_cast<int64_t>(c10::elementSize(operand_dtype_));
  const bool converts = dtype_ != operand_dtype_;
  TileBytes bytes;
  if (converts || (A.device() == device_ && !blas_readable(A))) bytes.row = element * k;
  if (converts || (B.device() == device_ && !blas_readable(B))) bytes.column = element * k;
  if (dtype_ != compute_dtype_) bytes.element = sizeof(float);
  return bytes;
}

at::Tensor TileProduct::copied(const at::Tensor& part, at::Tensor& buffer) const {
  if (dtype_ == operand_dtype_ && blas_readable(part)) return part;
  return view_of(buffer, part.sizes(), part.options().dtype(operand_dtype_)).copy_(part);
}

TileOperand TileProduct::row_operand(const at::Tensor& part, at::Tensor& buffer) const {
  return is_split_ ? split_rows(part[0], buffer) : TileOperand{copied(part, buffer), {}};
}

TileOperand TileProduct::column_operand(const at::Tensor& part, at::Tensor& buffer) const {
  return is_split_ ? split_columns(part[0], buffer) : TileOperand{copied(part, buffer), {}};
}

void TileProduct::multiply(at::Tensor& out, const TileOperand& A, const TileOperand& B) {
  if (is_split_) {
    at::Tensor matrix = out[0];
    multiply_split_out(matrix, A, B, result_buffer_);
  } else if (dtype_ == compute_dtype_) {
    multiply_into(out, A.values, B.values);
  } else {
    auto result = view_of(result_buffer_, out.sizes(), out.options().dtype(compute_dtype_));
    multiply_into(result, A.values, B.values);
    out.copy_(result);
  }
}

void TileProduct::multiply_into(at::Tensor& out, const at::Tensor& A, const at::Tensor& B) const {
#ifdef TORCHIUM_WITH_CUDA
  if (device_.is_cuda() && dtype_ == at::kFloat) {
    multiply_strided_out(out, A, B, precision_);
    return;
  }
#endif
  if (operand_dtype_ != compute_dtype_) {
    at::bmm_out(out, A, B, compute_dtype_);
  } else if (out.size(0) == 1) {
    auto matrix = out[0];
    at::mm_out(matrix, A[0], B[0]);
  } else {
    at::bmm_out(out, A, B);
  }
}

}  // namespace torchium::linalg::detail
