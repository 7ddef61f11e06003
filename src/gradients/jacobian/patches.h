// Calls of linear and convolution layers as sums of outer products of vectors.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>

namespace torchium::gradients::detail {

// Sizes of a linear or convolution weight.
struct WeightGeometry {
  int64_t groups;   // of channels; each has its own matrix [fan_out, fan_in]
  int64_t fan_in;   // of one group
  int64_t fan_out;  // of one group
  int64_t kernel_height = 1;
  int64_t kernel_width = 1;
  int64_t kernel_depth = 1;
};

// A linear layer with a weight [in, out], or a transposed convolution, with input and output
// gradient exchanged: the gradient of the weight is then that of a linear layer with a weight [out,
// in], or of the convolution from output to input. Any other call as it is. Not for the bias.
// ValueError, naming `call_index`, unless the tensors fit.
LayerCall with_plain_weight(const LayerCall& call, at::IntArrayRef weight_shape, size_t call_index);

// Raises ValueError, naming `call_index`, unless the call fits a weight of this shape. That of a
// transposed convolution is [in, out / groups, ...]: fan_out counts its inputs. Usable on tensors
// with symbolic sizes.
WeightGeometry weight_geometry(const LayerCall& call, at::IntArrayRef weight_shape,
                               size_t call_index);

// The gradient of sample i with respect to a group's matrix is sum_t G[group, i, t] A[group, i,
// t]^T, with inputs A and output gradients G. A linear layer has one position t per index of its
// input's middle dimensions, a convolution one per output pixel. Dimensions 1 and 2 can be viewed
// as one.
struct Positions {
  at::Tensor A;  // [groups, n, T, fan_in]
  at::Tensor G;  // [groups, n, T, fan_out]

  Positions narrow(int64_t first, int64_t count) const {
    return {A.narrow(1, first, count), G.narrow(1, first, count)};
  }
  Positions to(at::ScalarType dtype) const { return {A.to(dtype), G.to(dtype)}; }
};

// The largest number of elements of unfolded patches at a time: on a CPU they stay in the cache, on
// a GPU each piece costs launches.
int64_t max_patch_elements(const at::Tensor& input);

// The input and the output gradient as factors on a GPU multiply them: in 16 bits if the gradient
// is, as autocast had the input in the layer. Tensor cores multiply those exactly, and accumulate
// in float32. Without keeps_16_bits, and on a CPU, in dtype. Without inputs: the input as it is.
struct Operands {
  at::Tensor input, gradient;
};
Operands operands_of(const LayerCall& call, at::ScalarType dtype, bool keeps_16_bits,
                     bool with_inputs);

// What the positions of a call are made of: its vectors are the patches of an image. A linear layer
// has one of height 1, a pixel per position, and a kernel of 1 x 1.
struct PositionImages {
  at::Tensor input;     // [n, groups * channels, height, width]
  at::Tensor gradient;  // [n, groups * fan_out, output height, output width]
  WeightGeometry weight;
  decltype(LayerCall::settings) settings;  // of a conv2d

  int64_t samples() const { return gradient.size(0); }
  int64_t positions() const { return gradient.size(2) * gradient.size(3); }
};

// The settings of a convolution that multiplies each pixel alone.
decltype(LayerCall::settings) settings_of_pixels();

// An int of the kernels.
inline int as_int(int64_t size) { return static_cast<int>(size); }

// Sets what the arguments of a kernel say of patches; arrays hold height and width.
template <typename Arguments>
void set_patches(Arguments& p, const PositionImages& images) {
  const int64_t kernel[] = {images.weight.kernel_height, images.weight.kernel_width};
  p.channels = as_int(images.input.size(1));
  for (const int i : {0, 1}) {
    p.size[i] = as_int(images.input.size(2 + i));
    p.kernel[i] = as_int(kernel[i]);
    p.output_size[i] = as_int(images.gradient.size(2 + i));
    p.stride[i] = as_int(images.settings[kStrideHeight + i]);
    p.padding[i] = as_int(images.settings[kPaddingHeight + i]);
    p.dilation[i] = as_int(images.settings[kDilationHeight + i]);
  }
}

// The positions of one call. Those of a convolution hold each input many times, so they are formed
// for some samples at a time.
class PositionSource {
 public:
  // keeps_16_bits: on a GPU vectors are left in 16 bits, or brought to those of the output gradient
  // as autocast did in the layer, for products that accumulate in float32. Without inputs: `A` of
  // positions is undefined.
  PositionSource(const LayerCall& call, const WeightGeometry& weight, at::ScalarType dtype,
                 bool keeps_16_bits = false, bool with_inputs = true);
  // Precomputed positions.
  explicit PositionSource(Positions whole);

  int64_t samples() const { return samples_; }
  int64_t positions() const { return positions_; }  // T
  // How many samples to request at a time, at least one, for patches of at most this many bytes.
  int64_t piece(int64_t max_bytes = std::numeric_limits<int64_t>::max()) const;
  Positions of_samples(int64_t first, int64_t count) const;
  // Holds the patches of all samples from now on, if they are copies on a GPU of at most this many
  // bytes, which are subtracted.
  void keep_patches(int64_t& bytes);
  // Without patches. Nothing for a conv3d, or precomputed positions.
  std::optional<PositionImages> images() const;

 private:
  // The operand that a convolution multiplies by its weight, formed when it is first needed.
  const at::Tensor& patches() const;

  LayerCall call_;  // its tensors as products take them
  WeightGeometry weight_{};
  bool is_precomputed_ = false;
  bool has_inputs_ = true;
  Positions whole_;  // undefined tensors: unfold
  mutable at::Tensor patches_;
  at::Tensor gradients_;
  int64_t samples_ = 0;
  int64_t positions_ = 0;
  int64_t piece_ = 0;
  int64_t patch_bytes_ = 0;  // of a sample
};

}  // namespace torchium::gradients::detail
