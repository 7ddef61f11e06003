// Uses of linear and convolution weights as outer products of vectors.
#pragma once

#include "gradients/layer_use.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::gradients::detail {

// Sizes of a linear or convolution weight. A linear layer has one group and one position per sample
// and middle dimension of its input; a convolution one position per output pixel.
struct WeightGeometry {
  int64_t groups;   // of channels; every group has a matrix [fan_out, fan_in] of its own
  int64_t fan_in;   // of one group
  int64_t fan_out;  // of one group
  int64_t kernel_height = 1;
  int64_t kernel_width = 1;
};

// Raises ValueError unless the use can be one of a weight of this shape: `use_index` names it.
WeightGeometry weight_geometry(const LayerUse& use, at::IntArrayRef weight_shape, size_t use_index);

// What a convolution multiplies by its weight: [n, groups, channels, kh, kw, height, width], the
// last two of the output. A view of the (zero-padded) input, that overlaps itself.
at::Tensor patches(const LayerUse& use, const WeightGeometry& weight, const at::Tensor& input);

// The gradient of sample i by the matrix of a group is sum_t G[i, group, t] A[i, group, t]^T.
struct Positions {
  at::Tensor A;  // [n, groups, T, fan_in]
  at::Tensor G;  // [n, groups, T, fan_out]
};

// In `dtype`. Copies no more than it must: a linear layer's positions are views in that dtype.
Positions positions(const LayerUse& use, const WeightGeometry& weight, at::ScalarType dtype);

}  // namespace torchium::gradients::detail
