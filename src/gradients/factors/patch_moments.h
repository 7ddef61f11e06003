// Second moments of a convolution's patches that are not formed.
#pragma once

#include "gradients/capture/layer_call.h"
#include "gradients/jacobian/patches.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// A_sum of a convolution with the patches of all positions, plus what it is to accumulate. The call
// must have device positions (device_factors.h). False, with nothing changed, if the sums are no
// matrices, or the operands no 16-bit numbers, or the patches are better formed. Otherwise one of:
// - products of shifted images (cuda_kernels/factors/patch_products.h): 3 x 3, stride 1, padding 1;
// - few channels: products of folded images (cuda_kernels/factors/folded_images.h);
// - channels in multiples of 64: a product of patches that are read where they are in the images.
bool store_patch_moment(at::Tensor& A_sum, const LayerCall& call, const WeightGeometry& weight,
                        bool accumulate);

}  // namespace torchium::gradients::detail
