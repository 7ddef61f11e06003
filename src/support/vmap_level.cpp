#include "support/vmap_level.h"

#include <ATen/functorch/BatchedFallback.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>

#include <vector>

namespace torchium::detail {

namespace functorch = at::functorch;

VmapLevel::VmapLevel(int64_t size)
    : size_(size),
      level_(functorch::initAndPushDynamicLayer(functorch::TransformType::Vmap, size,
                                                functorch::RandomnessType::Error)),
      warned_before_(functorch::isVmapFallbackWarningEnabled()) {
  functorch::setVmapFallbackWarningEnabled(false);
}

VmapLevel::~VmapLevel() {
  functorch::setVmapFallbackWarningEnabled(warned_before_);
  functorch::popDynamicLayerAndDeleteMetadata();
}

at::Tensor VmapLevel::batched(const at::Tensor& x) const {
  return functorch::makeBatched(x, /*bdim=*/0, level_);
}

at::Tensor VmapLevel::all(const at::Tensor& of_slice) const {
  const auto [value, dim] = functorch::unwrapTensorAtLevel(of_slice, level_);
  if (dim) {
    return value.movedim(*dim, 0);
  }
  std::vector<int64_t> sizes = value.sizes().vec();
  sizes.insert(sizes.begin(), size_);
  return value.expand(sizes);
}

}  // namespace torchium::detail
