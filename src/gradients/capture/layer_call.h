// One captured call of a layer in a forward pass: its input, and the gradient of the loss at its
// output.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace torchium::gradients::detail {

enum class LayerKind : int64_t {
  kLinear = 0,
  kConv2d = 1,
  kEmbedding = 2,
  kLayerNorm = 3,
  kGroupNorm = 4,
};

const char* name_of(LayerKind kind);

// Meaning of LayerCall::settings.
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
constexpr size_t kNormalizedDims = 0;    // layer norm: how many trailing dimensions it normalises
constexpr size_t kNumGroups = 0;         // group norm

// Dimension 0 of `input` and `output_gradient` is the sample. A linear layer on a vector, a
// convolution on [C, H, W] and a layer norm without leading dimensions have one sample.
struct LayerCall {
  LayerKind kind = LayerKind::kLinear;
  int64_t weight = -1;  // index in the parameters of the call; -1: absent or without gradient
  int64_t bias = -1;
  // Calls of one backward pass share a micro-batch and its samples.
  int64_t micro_batch = 0;
  std::array<int64_t, 8> settings{};
  double eps = 0.0;            // of a norm
  at::Tensor input;            // input of the layer; embedding: integer indices
  at::Tensor output_gradient;  // gradient of the loss by its output
};

// Whether the weight of a linear layer is [in, out].
inline bool has_transposed_weight(const LayerCall& call) {
  return call.kind == LayerKind::kLinear && call.settings[kTransposedWeight] != 0;
}

// Operators take calls as parallel lists: input, output gradient, eps, and a row of integers
// [kind, weight, bias, micro_batch, settings...] each.
constexpr size_t kCallRowSize = 12;

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

}  // namespace torchium::gradients::detail
