#include "gradients/jacobian/patches.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

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

// The weight of a conv1d as that of a conv2d of height 1.
std::vector<int64_t> convolution_shape(const LayerCall& call, at::IntArrayRef weight_shape) {
  std::vector<int64_t> shape = weight_shape.vec();
  if (call.kind == LayerKind::kConv2d && shape.size() == 3) {
    shape.insert(shape.begin() + 2, 1);
  }
  return shape;
}

void check_settings(const LayerCall& call, size_t index) {
  const auto [stride, padding, dilation, groups, is_transposed] = convolution_settings(call);
  const auto all_above = [](at::IntArrayRef values, int64_t bound) {
    return std::all_of(values.begin(), values.end(), [&](int64_t value) { return value > bound; });
  };
  TORCH_CHECK_VALUE(
      all_above(stride, 0) && all_above(padding, -1) && all_above(dilation, 0) && groups > 0,
      "calls[", index, "]: ", name_of(call.kind), " settings ", at::IntArrayRef(call.settings),
      "; stride, dilation and groups must be positive, padding not negative");
}

// Elements that the windows of this many positions cover.
template <typename Int>
Int covered_length(const Int& positions, int64_t kernel, int64_t stride, int64_t dilation) {
  return (positions - 1) * stride + (kernel - 1) * dilation + 1;
}

// A transposed convolution is the convolution from its output to its input, which need not reach
// the end of the output.
void check_convolution(const LayerCall& call, at::IntArrayRef shape, size_t index) {
  check_settings(call, index);
  const auto s = convolution_settings(call);
  const auto in = (s.is_transposed ? call.output_gradient : call.input).sym_sizes();
  const auto out = (s.is_transposed ? call.input : call.output_gradient).sym_sizes();
  const size_t n = spatial_dims(call);
  const size_t c = in.size() - n - 1;  // the dimension of the channels
  bool fits = shape.size() == n + 2 && c <= 1 && shape[0] % s.groups == 0 &&
              in[c] == shape[1] * s.groups && out[c] == shape[0] && (c == 0 || in[0] == out[0]);
  for (size_t i = 0; fits && i < n; ++i) {
    const auto &length = in[c + 1 + i], &positions = out[c + 1 + i];
    fits = s.is_transposed ? covered_length(positions, shape[2 + i], s.stride[i], s.dilation[i]) <=
                                 length + 2 * s.padding[i]
                           : positions == output_size(length, shape[2 + i], s.stride[i],
                                                      s.padding[i], s.dilation[i]);
  }
  TORCH_CHECK_VALUE(fits, "calls[", index, "]: ", s.is_transposed ? "a transposed " : "",
                    name_of(call.kind), " with a weight of shape ", shape, " and settings ",
                    at::IntArrayRef(call.settings), " got inputs of shape ", call.input.sym_sizes(),
                    " and output_gradients of shape ", call.output_gradient.sym_sizes(),
                    s.is_transposed ? ""
                                    : "; pass the (already padded) input, the gradient of the "
                                      "output and the layer's settings");
}

WeightGeometry convolution_geometry(at::IntArrayRef shape, int64_t groups) {
  return {groups,
          c10::multiply_integers(shape.begin() + 1, shape.end()),
          shape[0] / groups,
          shape[shape.size() - 2],
          shape.back(),
          shape.size() == 5 ? shape[2] : 1};
}

// The tensor with a leading sample dimension.
at::Tensor batched(const LayerCall& call, const at::Tensor& image) {
  return image.dim() == static_cast<int64_t>(spatial_dims(call)) + 1 ? image.unsqueeze(0) : image;
}

at::Tensor padded(const at::Tensor& images, at::IntArrayRef padding) {
  std::vector<int64_t> sides;  // the last dimension first
  for (size_t i = padding.size(); i-- > 0;) {
    sides.insert(sides.end(), 2, padding[i]);
  }
  const bool is_needed =
      std::any_of(padding.begin(), padding.end(), [](int64_t zeros) { return zeros > 0; });
  return is_needed ? at::constant_pad_nd(images, sides) : images;
}

// The operand that a convolution multiplies by its weight: [n, groups, channels, kernel..., pixels
// of the output...]. An overlapping view of the (zero-padded) input.
at::Tensor patches_of(const LayerCall& call, const WeightGeometry& weight,
                      const at::Tensor& input) {
  const auto s = convolution_settings(call);
  const size_t n = spatial_dims(call);
  const at::Tensor x = padded(batched(call, input), s.padding);
  const int64_t channels = x.size(1) / weight.groups;
  const std::array<int64_t, 3> kernel{weight.kernel_depth, weight.kernel_height,
                                      weight.kernel_width};
  const auto out = call.output_gradient.sizes();
  std::vector<int64_t> sizes{x.size(0), weight.groups, channels};
  std::vector<int64_t> strides{x.stride(0), x.stride(1) * channels, x.stride(1)};
  for (size_t i = 0; i < n; ++i) {
    sizes.push_back(kernel[3 - n + i]);
    strides.push_back(x.strides()[2 + i] * s.dilation[i]);
  }
  for (size_t i = 0; i < n; ++i) {
    sizes.push_back(out[out.size() - n + i]);
    strides.push_back(x.strides()[2 + i] * s.stride[i]);
  }
  return x.as_strided(sizes, strides);
}

}  // namespace

WeightGeometry weight_geometry(const LayerCall& call, at::IntArrayRef weight_shape,
                               size_t call_index) {
  if (call.kind == LayerKind::kLinear) {
    check_linear(call, weight_shape, call_index);
    return {1, weight_shape[1], weight_shape[0]};
  }
  TORCH_CHECK_VALUE(is_convolution(call), "calls[", call_index, "] is a ", name_of(call.kind),
                    " layer; only linear layers and convolutions have Kronecker factors");
  const std::vector<int64_t> shape = convolution_shape(call, weight_shape);
  check_convolution(call, shape, call_index);
  return convolution_geometry(shape, groups_of(call));
}

LayerCall with_plain_weight(const LayerCall& call, at::IntArrayRef weight_shape,
                            size_t call_index) {
  if (!has_transposed_weight(call) && !is_transposed_convolution(call)) {
    return call;
  }
  LayerCall plain = call;
  std::swap(plain.input, plain.output_gradient);
  if (call.kind == LayerKind::kLinear) {
    plain.settings[kTransposedWeight] = 0;
    return plain;
  }
  const std::vector<int64_t> shape = convolution_shape(call, weight_shape);
  check_convolution(call, shape, call_index);
  const size_t n = spatial_dims(call);
  const auto s = convolution_settings(call);
  // Only as much of the padded output as the windows of the inputs cover.
  at::Tensor windows = padded(batched(call, plain.input), s.padding);
  const at::Tensor x = batched(call, plain.output_gradient);
  for (size_t i = 0; i < n; ++i) {
    const auto dim = static_cast<int64_t>(2 + i);
    windows = windows.narrow(dim, 0,
                             covered_length(x.size(dim), shape[2 + i], s.stride[i], s.dilation[i]));
  }
  plain.input = windows;
  plain.output_gradient = x;
  std::fill_n(plain.settings.begin() + n, n, 0);  // the padding
  plain.settings[3 * n + 1] = 0;
  return plain;
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
                               at::ScalarType dtype, bool keeps_16_bits, bool with_inputs)
    : call_(call), weight_(weight), has_inputs_(with_inputs) {
  auto [input, gradient] = operands_of(call, dtype, keeps_16_bits, with_inputs);
  call_.input = std::move(input);
  call_.output_gradient = std::move(gradient);
  if (call.kind == LayerKind::kLinear) {
    const at::Tensor& x = call_.input;
    samples_ = x.dim() == 1 ? 1 : x.size(0);
    positions_ = x.dim() <= 2 ? 1 : c10::multiply_integers(x.sizes().slice(1, x.dim() - 2));
    piece_ = samples_;
    whole_.G = call_.output_gradient.reshape({1, samples_, positions_, weight.fan_out});
    if (with_inputs) {
      whole_.A = x.reshape({1, samples_, positions_, weight.fan_in});
    }
    return;
  }
  gradients_ = batched(call, call_.output_gradient).unflatten(1, {weight.groups, weight.fan_out});
  samples_ = gradients_.size(0);
  positions_ = c10::multiply_integers(gradients_.sizes().slice(3));
  if (!with_inputs) {
    piece_ = samples_;
    return;
  }
  const int64_t elements = weight.groups * weight.fan_in * positions_;
  piece_ = std::max<int64_t>(1, max_patch_elements(call_.input) / std::max<int64_t>(1, elements));
  patch_bytes_ = elements * static_cast<int64_t>(call_.input.element_size());
}

PositionSource::PositionSource(Positions whole)
    : is_precomputed_(true),
      whole_(std::move(whole)),
      samples_(whole_.A.size(1)),
      positions_(whole_.A.size(2)),
      piece_(samples_) {}

int64_t PositionSource::piece(int64_t max_bytes) const {
  return patch_bytes_ == 0 ? piece_ : std::clamp<int64_t>(max_bytes / patch_bytes_, 1, piece_);
}

const at::Tensor& PositionSource::patches() const {
  if (!patches_.defined()) {
    patches_ = patches_of(call_, weight_, call_.input);
  }
  return patches_;
}

Positions PositionSource::of_samples(int64_t first, int64_t count) const {
  if (whole_.G.defined()) {
    return count == samples_ ? whole_ : whole_.narrow(first, count);
  }
  // [groups, vector, n, T]: the pixels of each sample in turn, for products that sum over both.
  const auto vectors = [&](const at::Tensor& images) {
    const int64_t spatial = gradients_.dim() - 3;
    const at::Tensor grouped = images.narrow(0, first, count).movedim(0, -1 - spatial);
    return grouped.reshape({grouped.size(0), -1, count, positions_}).permute({0, 2, 3, 1});
  };
  return {has_inputs_ ? vectors(patches()) : at::Tensor(), vectors(gradients_)};
}

void PositionSource::keep_patches(int64_t& bytes) {
  if (!gradients_.defined() || !has_inputs_ || !call_.input.is_cuda() || piece_ < samples_) {
    return;
  }
  const int64_t needed = samples_ * weight_.groups * weight_.fan_in * positions_ *
                         static_cast<int64_t>(call_.input.element_size());
  if (needed <= bytes) {
    bytes -= needed;
    whole_ = of_samples(0, samples_);
    patches_ = gradients_ = at::Tensor();
  }
}

decltype(LayerCall::settings) settings_of_pixels() {
  decltype(LayerCall::settings) settings{};
  settings[kStrideHeight] = settings[kStrideWidth] = 1;
  settings[kDilationHeight] = settings[kDilationWidth] = settings[kGroups] = 1;
  return settings;
}

std::optional<PositionImages> PositionSource::images() const {
  if (is_precomputed_ || !has_inputs_ || call_.kind == LayerKind::kConv3d) {
    return std::nullopt;
  }
  if (call_.kind == LayerKind::kLinear) {
    const auto image = [](const at::Tensor& vectors) {  // [n, vector, 1, T]
      return vectors[0].permute({0, 2, 1}).unsqueeze(2);
    };
    return PositionImages{image(whole_.A), image(whole_.G), weight_, settings_of_pixels()};
  }
  return PositionImages{batched(call_, call_.input), batched(call_, call_.output_gradient), weight_,
                        call_.settings};
}

}  // namespace torchium::gradients::detail
