// One captured call of a layer in a forward pass: its input, and the gradient of the loss at its
// output.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace torchium::gradients::detail {

enum class LayerKind : int64_t {
  kLinear = 0,
  kConv2d = 1,  // or conv1d, as one of height 1; its weight stays [out, in, width]
  kEmbedding = 2,
  kLayerNorm = 3,
  kGroupNorm = 4,
  kConv3d = 5,
  kRmsNorm = 6,
  kBatchNorm = 7,   // only captured for K-FAC
  kRegistered = 8,  // a layer with a formula (registered_layer.h)
};
constexpr LayerKind kLastKind = LayerKind::kRmsNorm;  // of those that operators take

const char* name_of(LayerKind kind);

// Meaning of LayerCall::settings. A convolution with n = 2 or 3 spatial dimensions has n strides, n
// paddings, n dilations, the groups, and 1 if it is transposed, with a weight [in, out / groups,
// ...]. Those of a conv2d by name:
enum ConvSetting : size_t {
  kStrideHeight = 0,
  kStrideWidth = 1,
  kPaddingHeight = 2,
  kPaddingWidth = 3,
  kDilationHeight = 4,
  kDilationWidth = 5,
  kGroups = 6,
};
constexpr size_t kTransposedWeight = 0;  // linear: 1 for a weight [in, out]
constexpr size_t kPaddingIndex = 0;      // embedding: row without a gradient, -1: none
constexpr size_t kNormalizedDims = 0;    // layer, RMS norm: how many trailing dimensions it takes
constexpr size_t kNumGroups = 0;         // group norm

struct RegisteredLayer;

// Dimension 0 of `input` and `output_gradient` is the sample. A linear layer on a vector, a
// convolution on [C, H, W] or [C, D, H, W] and a layer norm without leading dimensions have one
// sample.
struct LayerCall {
  LayerKind kind = LayerKind::kLinear;
  int64_t weight = -1;  // index in the parameters of the call; -1: absent or without gradient
  int64_t bias = -1;
  // Calls of one backward pass share a micro-batch and its samples.
  int64_t micro_batch = 0;
  // The first backward pass over the same samples whose gradients still exist; CaptureState, if it
  // joins passes, otherwise -1.
  int64_t first_pass = -1;
  std::array<int64_t, 12> settings{};
  double eps = 0.0;            // of a norm; kRmsNorm, below 0: it has none
  at::Tensor input;            // input of the layer; embedding: integer indices
  at::Tensor output_gradient;  // of the loss with respect to the output
  // Batch norm: the running statistics that it used, [C]; undefined: it used those of the input.
  at::Tensor mean, variance;
  std::shared_ptr<const RegisteredLayer> registered;  // null: of another kind
};

// Whether the weight of a linear layer is [in, out].
inline bool has_transposed_weight(const LayerCall& call) {
  return call.kind == LayerKind::kLinear && call.settings[kTransposedWeight] != 0;
}

inline bool is_convolution(const LayerCall& call) {
  return call.kind == LayerKind::kConv2d || call.kind == LayerKind::kConv3d;
}

// Whether the layer multiplies a matrix, its weight, by vectors.
inline bool is_product(const LayerCall& call) {
  return call.kind == LayerKind::kLinear || is_convolution(call);
}

// Whether the layer multiplies its normalised input by its weight, element by element.
inline bool is_norm(const LayerCall& call) {
  return call.kind == LayerKind::kLayerNorm || call.kind == LayerKind::kGroupNorm ||
         call.kind == LayerKind::kRmsNorm || call.kind == LayerKind::kBatchNorm;
}

// Of a convolution.
inline size_t spatial_dims(const LayerCall& call) {
  return call.kind == LayerKind::kConv3d ? 3 : 2;
}

// Views of the settings of a convolution.
struct ConvolutionSettings {
  at::IntArrayRef stride, padding, dilation;
  int64_t groups;
  bool is_transposed;
};
ConvolutionSettings convolution_settings(const LayerCall& call);

// 1 without convolution.
int64_t groups_of(const LayerCall& call);

inline bool is_transposed_convolution(const LayerCall& call) {
  return is_convolution(call) && convolution_settings(call).is_transposed;
}

// Operators take calls as parallel lists: input, output gradient, eps, and a row of integers
// [kind, weight, bias, micro_batch, settings...] each.
constexpr size_t kCallRowSize = 16;

// A call without tensors and eps, from the row that begins here.
LayerCall call_from_row(const int64_t* row);

// Raises ValueError if lengths differ or a kind is unknown.
std::vector<LayerCall> parse_calls(at::TensorList inputs, at::TensorList output_gradients,
                                   at::IntArrayRef rows, at::ArrayRef<double> eps);

// Raises ValueError if an index is not one of the `params` parameters, or if a tensor does not fit
// the layer.
void check_calls(const std::vector<LayerCall>& calls, int64_t params);

// Only the checks of the tensors of one call.
void check_call_tensors(const LayerCall& call, size_t index);

// The number of samples in a call. Works on tensors with symbolic sizes.
c10::SymInt samples_of(const LayerCall& call);
// The same for a call with an input of this shape.
int64_t samples_of(const LayerCall& call, at::IntArrayRef input);
// Whether dimension 0 of the input is the sample.
bool has_sample_dimension(const LayerCall& call);

}  // namespace torchium::gradients::detail
