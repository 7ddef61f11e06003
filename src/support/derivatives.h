// Whether a tensor takes part in differentiation or in torch.vmap.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::detail {

// In forward mode, which grad mode does not turn off; at the level of the tensor itself.
inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// The tensor and what it wraps: under nested transforms of torch.func, each tensor wraps that of
// the transform around it. Each has a graph of its own.
std::vector<at::Tensor> levels_of(const at::Tensor& tensor);

// At any level.
bool requires_grad(const at::Tensor& tensor);
bool has_any_tangent(const at::Tensor& tensor);
// In reverse or forward mode.
bool is_differentiated(const at::Tensor& tensor);
// By torch.vmap, or by torch.autograd.grad(is_grads_batched=True).
bool is_batched(const at::Tensor& tensor);

}  // namespace torchium::detail
