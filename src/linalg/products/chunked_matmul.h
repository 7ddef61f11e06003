// Matrix products with a bounded workspace: see torchium/linalg/products.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace torchium::linalg::detail {

at::Tensor chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                          std::optional<int64_t> max_workspace_bytes);
at::Tensor chunked_matmul_meta(const at::Tensor& A, const at::Tensor& B,
                               std::optional<int64_t> max_workspace_bytes);

}  // namespace torchium::linalg::detail
