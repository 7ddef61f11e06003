// Matrix products with a bounded workspace: see torchium/linalg/products.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace torchium::linalg::detail {

at::Tensor chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                          std::optional<int64_t> max_workspace_bytes,
                          std::optional<std::string_view> precision);
at::Tensor chunked_matmul_meta(const at::Tensor& A, const at::Tensor& B,
                               std::optional<int64_t> max_workspace_bytes,
                               std::optional<std::string_view> precision);

}  // namespace torchium::linalg::detail
