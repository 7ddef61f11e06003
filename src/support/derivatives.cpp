#include "support/derivatives.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace torchium::detail {
namespace {

namespace functorch = at::functorch;

// What a transform has wrapped; undefined: the tensor is no wrapper.
at::Tensor wrapped(const at::Tensor& tensor) {
  if (const auto* wrapper = functorch::maybeGetTensorWrapper(tensor)) {
    return wrapper->value();
  }
  if (const auto* batch = functorch::maybeGetBatchedImpl(tensor)) {
    return batch->value();
  }
  return {};
}

}  // namespace

std::vector<at::Tensor> levels_of(const at::Tensor& tensor) {
  std::vector<at::Tensor> levels;
  for (at::Tensor level = tensor; level.defined(); level = wrapped(level)) {
    levels.push_back(level);
  }
  return levels;
}

bool requires_grad(const at::Tensor& tensor) {
  const auto levels = levels_of(tensor);
  return std::any_of(levels.begin(), levels.end(),
                     [](const at::Tensor& level) { return level.requires_grad(); });
}

bool has_any_tangent(const at::Tensor& tensor) {
  const auto levels = levels_of(tensor);
  return std::any_of(levels.begin(), levels.end(), &has_tangent);
}

bool is_batched(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys{c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched};
  const auto levels = levels_of(tensor);
  return std::any_of(levels.begin(), levels.end(),
                     [&](const at::Tensor& level) { return level.key_set().has_any(keys); });
}

bool is_differentiated(const at::Tensor& tensor) {
  return (c10::GradMode::is_enabled() && requires_grad(tensor)) || has_any_tangent(tensor);
}

}  // namespace torchium::detail
