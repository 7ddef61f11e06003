// Where a chunked product is computed and how much memory it may use. Decided before it begins.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torchium::linalg::detail {

struct ProductOptions {
  std::optional<int64_t> max_workspace_bytes;
  std::optional<std::string> precision;
};

struct ProductPlacement {
  c10::Device device;        // that computes
  at::TensorOptions result;  // its dtype and memory
  bool is_streamed;          // an operand or the result is in host memory, `device` is not
};

// CUDA, if an operand is there or in pinned host memory. The result is on that device if an operand
// is and the free memory holds it, else in pinned host memory.
ProductPlacement product_placement(const at::Tensor& A, const at::Tensor& B, at::IntArrayRef sizes);

// The bytes that a product may use which as a whole needs `everything`: as requested; otherwise
// `everything` if that is at most 64 MiB; otherwise a quarter of the free memory, at least 64 MiB
// but never more than is free. Without a request also at most workspace_limit().
int64_t workspace_budget(c10::Device device, std::optional<int64_t> requested, double everything);

// c10::ValueError: the budget is less than the workspace of one element of A B.
void check_budget(const char* op, const at::Tensor& A, const at::Tensor& B, int64_t budget,
                  int64_t least);

}  // namespace torchium::linalg::detail
