// How a product with operands in host memory is cut into chunks.
#pragma once

#include "linalg/products/product_workspace.h"
#include "linalg/products/tile_product.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

struct StreamPlan {
  int64_t rows, columns;    // of a chunk of A and of B
  bool keeps_rows;          // A is kept on the device and B passes, or the other way round
  int64_t kept_chunks = 1;  // that are on the device at a time
  bool result_on_host;
};

// The largest chunks, at most 4096 rows and columns, whose buffers are within the budget, and of
// the operand that is kept as many as possible; keeps the operand for which fewer bytes are copied.
// Sets whether the product splits its operands. c10::ValueError: the budget is too small.
StreamPlan plan_stream(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                       c10::Device device, const ProductOptions& options, TileProduct& product);

}  // namespace torchium::linalg::detail
