#include "gradients/factors/patches.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::gradients::detail {
namespace {

// Output pixels along one dimension.
c10::SymInt output_size(const c10::SymInt& input, int64_t kernel, int64_t stride, int64_t padding,
                        int64_t dilation) {
  return (input + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
}

void check_linear(const LayerCall& call, at::IntArrayRef shape, size_t index) {
  const auto in = call.input.sym_sizes();
  const auto out = call.output_gradient.sym_sizes();
  TORCH_CHECK_VALUE(shape.size() == 2 && in.back() == shape[1] && out.back() == shape[0] &&
                        in.slice(0, in.size() - 1) == out.slice(0, out.size() - 1),
                    "calls[", index, "]: a linear layer with a weight of shape ", shape,
                    " got inputs of shape ", in, " and output_gradients of shape ", out,
                    "; they must be [..., in] and [..., out] with the same leading dimensions");
}

void check_conv2d(const LayerCall& call, at::IntArrayRef shape, size_t index) {
  const auto& s = call.settings;
  TORCH_CHECK_VALUE(s[kStrideHeight] > 0 && s[kStrideWidth] > 0 && s[kPaddingHeight] >= 0 &&
                        s[kPaddingWidth] >= 0 && s[kDilationHeight] > 0 && s[kDilationWidth] > 0 &&
                        s[kGroups] > 0,
                    "calls[", index, "]: conv2d settings ", at::IntArrayRef(s),
                    "; stride, dilation and groups must be positive, padding not negative");
  const auto in = call.input.sym_sizes();
  const auto out = call.output_gradient.sym_sizes();
  const size_t c = in.size() - 3;  // the dimension of the channels
  TORCH_CHECK_VALUE(
      shape.size() == 4 && shape[0] % s[kGroups] == 0 && in[c] == shape[1] * s[kGroups] &&
          out[c] == shape[0] && (c == 0 || in[0] == out[0]) &&
          out[c + 1] == output_size(in[c + 1], shape[2], s[kStrideHeight], s[kPaddingHeight],
                                    s[kDilationHeight]) &&
          out[c + 2] == output_size(in[c + 2], shape[3], s[kStrideWidth], s[kPaddingWidth],
                                    s[kDilationWidth]),
      "calls[", index, "]: conv2d with a weight of shape ", shape, " and settings ",
      at::IntArrayRef(s), " got inputs of shape ", in, " and output_gradients of shape ", out,
      "; pass the (already padded) input, the gradient of the output and the layer's settings");
}

// The tensor with a leading sample dimension.
at::Tensor batched(const at::Tensor& image) {
  return image.dim() == 3 ? image.unsqueeze(0) : image;
}

// The operand that a convolution multiplies by its weight: [n, groups, channels, kh, kw, height,
// width], the last two of the output. An overlapping view of the (zero-padded) input.
at::Tensor patches(const LayerCall& call, const WeightGeometry& weight, const at::Tensor& input) {
  const auto& s = call.settings;
  const int64_t pad_height = s[kPaddingHeight];
  const int64_t pad_width = s[kPaddingWidth];
  at::Tensor x = batched(input);
  if (pad_height > 0 || pad_width > 0) {
    x = at::constant_pad_nd(x, {pad_width, pad_width, pad_height, pad_height});
  }
  const int64_t channels = x.size(1) / weight.groups;
  const at::Tensor out = batched(call.output_gradient);
  return x.as_strided({x.size(0), weight.groups, channels, weight.kernel_height,
                       weight.kernel_width, out.size(2), out.size(3)},
                      {x.stride(0), x.stride(1) * channels, x.stride(1),
                       x.stride(2) * s[kDilationHeight], x.stride(3) * s[kDilationWidth],
                       x.stride(2) * s[kStrideHeight], x.stride(3) * s[kStrideWidth]});
}

}  // namespace

WeightGeometry weight_geometry(const LayerCall& call, at::IntArrayRef weight_shape,
                               size_t call_index) {
  if (call.kind == LayerKind::kLinear) {
    check_linear(call, weight_shape, call_index);
    return {1, weight_shape[1], weight_shape[0]};
  }
  TORCH_CHECK_VALUE(call.kind == LayerKind::kConv2d && call.input.dim() <= 4, "calls[", call_index,
                    "] is a ", name_of(call.kind), " layer with an input of shape ",
                    call.input.sym_sizes(),
                    "; only linear and conv2d weights have Kronecker factors");
  check_conv2d(call, weight_shape, call_index);
  const int64_t groups = call.settings[kGroups];
  return {groups, weight_shape[1] * weight_shape[2] * weight_shape[3], weight_shape[0] / groups,
          weight_shape[2], weight_shape[3]};
}

int64_t max_patch_elements(const at::Tensor& input) {
  return int64_t{1} << (input.is_cuda() ? 27 : 22);
}

Operands operands_of(const LayerCall& call, at::ScalarType dtype, bool keeps_16_bits,
                     bool with_inputs) {
  const at::ScalarType narrow = call.output_gradient.scalar_type();
  const bool stays = keeps_16_bits && call.input.is_cuda() && at::isReducedFloatingType(narrow);
  const at::ScalarType type = stays ? narrow : dtype;
  return {with_inputs ? call.input.to(type) : call.input, call.output_gradient.to(type)};
}

PositionSource::PositionSource(const LayerCall& call, const WeightGeometry& weight,
                               at::ScalarType dtype, bool keeps_16_bits, bool with_inputs) {
  const auto [input, gradient] = operands_of(call, dtype, keeps_16_bits, with_inputs);
  if (call.kind == LayerKind::kLinear) {
    samples_ = input.dim() == 1 ? 1 : input.size(0);
    positions_ =
        input.dim() <= 2 ? 1 : c10::multiply_integers(input.sizes().slice(1, input.dim() - 2));
    piece_ = samples_;
    whole_.G = gradient.reshape({1, samples_, positions_, weight.fan_out});
    if (with_inputs) {
      whole_.A = input.reshape({1, samples_, positions_, weight.fan_in});
    }
    return;
  }
  gradients_ = batched(gradient).unflatten(1, {weight.groups, weight.fan_out});
  samples_ = gradients_.size(0);
  positions_ = gradients_.size(3) * gradients_.size(4);
  if (!with_inputs) {
    piece_ = samples_;
    return;
  }
  patches_ = patches(call, weight, input);
  const int64_t elements = weight.groups * weight.fan_in * positions_;
  piece_ = std::max<int64_t>(1, max_patch_elements(input) / std::max<int64_t>(1, elements));
}

PositionSource::PositionSource(Positions whole)
    : whole_(std::move(whole)),
      samples_(whole_.A.size(1)),
      positions_(whole_.A.size(2)),
      piece_(samples_) {}

Positions PositionSource::of_samples(int64_t first, int64_t count) const {
  if (whole_.G.defined()) {
    return count == samples_ ? whole_ : whole_.narrow(first, count);
  }
  // [groups, vector, n, T]: the pixels of each sample in turn, for products that sum over both.
  const auto vectors = [&](const at::Tensor& images) {
    const at::Tensor grouped = images.narrow(0, first, count).movedim(0, -3);
    return grouped.reshape({grouped.size(0), -1, count, positions_}).permute({0, 2, 3, 1});
  };
  return {patches_.defined() ? vectors(patches_) : at::Tensor(), vectors(gradients_)};
}

}  // namespace torchium::gradients::detail
