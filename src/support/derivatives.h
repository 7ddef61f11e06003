// Whether a tensor takes part in differentiation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

namespace torchium::detail {

// In forward mode, which grad mode does not turn off.
inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// In reverse or forward mode.
inline bool is_differentiated(const at::Tensor& tensor) {
  return (c10::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent(tensor);
}

}  // namespace torchium::detail
