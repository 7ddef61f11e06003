// Kronecker factors on a GPU: patches with the channels innermost, as cuDNN keeps images, and
// products on tensor cores.
#pragma once

#include "gradients/capture/layer_call.h"
#include "gradients/jacobian/patches.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::gradients::detail {

// Whether a DevicePositions exists for the call of a layer: a convolution without groups on a GPU,
// with sums in float32.
bool has_device_positions(const LayerCall& call, const WeightGeometry& weight, at::ScalarType sums);

// The positions of a convolution (patches.h) with other patches: [pixels, channels], all channels
// of a pixel side by side, and zeros up to a multiple of 8 elements. They are copies only if the
// kernel covers more than one pixel or skips some.
class DevicePositions {
 public:
  // Without inputs: `A` of positions is undefined.
  DevicePositions(const LayerCall& call, const WeightGeometry& weight, bool with_inputs);

  int64_t samples() const { return gradient_.size(0); }
  int64_t positions() const { return gradient_.size(2) * gradient_.size(3); }
  int64_t pixels() const { return weight_.kernel_height * weight_.kernel_width; }
  int64_t piece() const;
  Positions of_samples(int64_t first, int64_t count) const;

 private:
  at::Tensor unfolded(const at::Tensor& images) const;

  WeightGeometry weight_;
  decltype(LayerCall::settings) settings_;
  // [n, channels, height, width], channels-last; without inputs, input_ is undefined.
  at::Tensor input_, gradient_;
};

// Whether store_moment() supports the sum and the vectors.
bool has_moment_kernel(const at::Tensor& sum, const at::Tensor& X);

// second_moment_() of kronecker_factors.cpp: sum[g] <- X[g] X[g]^T, plus sum[g] to accumulate. X:
// [groups, vector, count], float32, or fp16 or bfloat16 with sums in float32. Only the first
// `length` elements of a vector count. pixels: of a patch whose channels lie side by side, for a
// sum in the order of the weight; else 1.
void store_moment(at::Tensor& sum, const at::Tensor& X, int64_t length, int64_t pixels,
                  bool accumulate);

}  // namespace torchium::gradients::detail
