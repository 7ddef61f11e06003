// How a product with operands in host memory is cut into chunks.
#pragma once

#include "linalg/products/product_workspace.h"
#include "linalg/products/tile_product.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

struct StreamPlan {
  int64_t rows, columns;  // of a chunk of A and of B
  // Chunks that are on the device at a time. If not all of both fit, those of one operand pass: 1.
  int64_t rows_on_device = 1, columns_on_device = 1;
  bool result_on_host = false;
};

// Buffers of one chunk each that an operand in host memory is copied to. Split operands keep their
// parts alone; where chunks pass, one is copied while the other is multiplied.
int64_t slots_of(bool is_split, int64_t on_device, int64_t count);

// Chunks of at most 4096 rows and columns, whose buffers are within the budget: all of both
// operands if they fit, otherwise as many as possible of the one for which fewer bytes are copied
// then. Sets whether the product splits its operands. c10::ValueError: the budget is too small.
StreamPlan plan_stream(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                       c10::Device device, const ProductOptions& options, TileProduct& product);

}  // namespace torchium::linalg::detail
