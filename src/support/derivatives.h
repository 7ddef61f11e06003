// Whether a tensor takes part in differentiation or in torch.vmap.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

namespace torchium::detail {

// In forward mode, which grad mode does not turn off.
inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

inline bool is_batched(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::FuncTorchBatched);
}

// In reverse or forward mode.
inline bool is_differentiated(const at::Tensor& tensor) {
  return (c10::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent(tensor);
}

}  // namespace torchium::detail
