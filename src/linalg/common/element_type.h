// The dtype of a tensor as kernels name it.
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <c10/core/ScalarType.h>

#include <optional>

namespace torchium::linalg::detail {

// None: no kernel supports such elements.
inline std::optional<cuda_kernels::ElementType> element_type(at::ScalarType type) {
  using cuda_kernels::ElementType;
  switch (type) {
    case at::kFloat:
      return ElementType::kFloat;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kHalf:
      return ElementType::kHalf;
    case at::kDouble:
      return ElementType::kDouble;
    default:
      return std::nullopt;
  }
}

}  // namespace torchium::linalg::detail
