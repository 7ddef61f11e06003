// Arithmetic outside of all transforms of torch.func.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchium::detail {

// While it lives, operators of this thread make tensors with memory, not wrappers of a transform.
// Their operands must not be wrappers either.
class NoTransforms {
  c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::functorch_transforms_ks |
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

}  // namespace torchium::detail
