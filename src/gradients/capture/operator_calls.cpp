#include "gradients/capture/operator_calls.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace torchium::gradients::detail {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Reading = std::optional<OperatorCall>;

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// The tensor whose whole transpose is `operand` (same memory, sizes and strides swapped), and which
// receives its gradient; undefined if there is none.
at::Tensor untransposed(const at::Tensor& operand) {
  at::Tensor source;
  if (operand.requires_grad()) {
    const auto& node = operand.grad_fn();
    if (node == nullptr || node->num_outputs() != 1) {
      return {};
    }
    const auto* leaf =
        dynamic_cast<const torch::autograd::AccumulateGrad*>(node->next_edge(0).function.get());
    if (leaf != nullptr) {
      source = leaf->variable;
    }
  } else if (operand.is_view()) {  // a frozen parameter, whose layer may have a bias
    source = operand._base();
    if (source.requires_grad()) {  // transposed where no gradients were recorded
      return {};
    }
  }
  if (!source.defined() || source.layout() != at::kStrided || source.dim() != 2 ||
      operand.dim() != 2 || !source.is_alias_of(operand) ||
      source.storage_offset() != operand.storage_offset()) {
    return {};
  }
  const bool swapped = source.size(0) == operand.size(1) && source.size(1) == operand.size(0) &&
                       source.stride(0) == operand.stride(1) &&
                       source.stride(1) == operand.stride(0);
  return swapped ? source : at::Tensor();
}

OperatorCall make_call(LayerKind kind, at::Tensor weight, at::Tensor bias, at::Tensor input) {
  OperatorCall call;
  call.weight = std::move(weight);
  call.bias = std::move(bias);
  call.input = input;
  call.layer.kind = kind;
  call.layer.input = std::move(input);
  return call;
}

Reading product(const at::Tensor& input, const at::Tensor& operand, at::Tensor bias) {
  at::Tensor weight = untransposed(operand);
  const bool is_itself =
      !weight.defined() && operand.dim() == 2 && operand.requires_grad() && operand.is_leaf();
  if (is_itself) {
    weight = operand;
  }
  if (!weight.defined() && !bias.defined()) {
    return std::nullopt;
  }
  OperatorCall call = make_call(LayerKind::kLinear, std::move(weight), std::move(bias), input);
  call.layer.settings[kTransposedWeight] = is_itself ? 1 : 0;
  return call;
}

Reading linear(Arguments a) {
  return make_call(LayerKind::kLinear, a[1].toTensor(), tensor_or_none(a[2]), a[0].toTensor());
}

Reading addmm(Arguments a) {
  if (!a[3].toScalar().equal(1) || !a[4].toScalar().equal(1)) {
    return std::nullopt;
  }
  const at::Tensor& addend = a[0].toTensor();
  return product(a[1].toTensor(), a[2].toTensor(), addend.dim() == 1 ? addend : at::Tensor());
}

Reading matmul(Arguments a) { return product(a[0].toTensor(), a[1].toTensor(), {}); }

Reading addition(Arguments a, bool in_place) {
  const at::Tensor& bias = a[1].toTensor();
  const at::Tensor& target = a[0].toTensor();
  const bool is_bias = bias.dim() == 1 && bias.requires_grad() && bias.is_leaf() &&
                       target.dim() >= 1 && target.size(-1) == bias.size(0) &&
                       a[2].toScalar().equal(1);
  if (!is_bias) {
    return std::nullopt;
  }
  OperatorCall call = make_call(LayerKind::kLinear, {}, bias, target);
  call.is_in_place_addition = in_place;
  return call;
}
Reading add(Arguments a) { return addition(a, false); }
Reading add_(Arguments a) { return addition(a, true); }

// Arguments of a convolution: one number for all spatial dimensions, or one for each.
struct ConvolutionArguments {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
  bool is_transposed = false;
};

// Operators that take them have the input first, then weight and bias.
Reading convolution_call(Arguments a, const ConvolutionArguments& given) {
  const at::Tensor& weight = a[1].toTensor();
  const at::Tensor& input = a[0].toTensor();
  const auto dims = static_cast<size_t>(std::max<int64_t>(0, weight.dim() - 2));
  const auto fits = [&](const auto& list) { return list.size() == 1 || list.size() == dims; };
  if (dims < 1 || dims > 3 || !fits(given.stride) || !fits(given.padding) ||
      !fits(given.dilation)) {
    return std::nullopt;
  }
  OperatorCall call = make_call(dims == 3 ? LayerKind::kConv3d : LayerKind::kConv2d, weight,
                                tensor_or_none(a[2]), input);
  auto* setting = call.layer.settings.data();
  const auto append = [&](const std::vector<int64_t>& list, int64_t of_height) {
    if (dims == 1) {
      *setting++ = of_height;
    }
    for (size_t i = 0; i < dims; ++i) {
      *setting++ = list.size() == 1 ? list[0] : list[i];
    }
  };
  append(given.stride, 1);
  append(given.padding, 0);
  append(given.dilation, 1);
  *setting++ = given.groups;
  *setting = given.is_transposed ? 1 : 0;
  if (dims == 1) {
    call.layer.input = input.unsqueeze(-2);
  }
  return call;
}

Reading conv(Arguments a) {
  return convolution_call(
      a, {a[3].toIntVector(), a[4].toIntVector(), a[5].toIntVector(), a[6].toInt()});
}

// "valid" and "same"; "same" pads one more zero behind than before where the total is odd.
Reading conv_with_named_padding(Arguments a) {
  const auto dilation = a[5].toIntVector();
  const auto kernel = a[1].toTensor().sizes().slice(2);
  std::vector<int64_t> padding(kernel.size(), 0);
  std::vector<int64_t> behind;  // the last dimension first
  if (a[4].toStringRef() == "same" && !dilation.empty()) {
    for (size_t i = kernel.size(); i-- > 0;) {
      const int64_t total = (dilation.size() == 1 ? dilation[0] : dilation[i]) * (kernel[i] - 1);
      padding[i] = total / 2;
      behind.insert(behind.end(), {0, total % 2});
    }
  }
  Reading call = convolution_call(a, {a[3].toIntVector(), padding, dilation, a[6].toInt()});
  const bool is_uneven = std::any_of(behind.begin(), behind.end(), [](auto n) { return n > 0; });
  if (call && is_uneven) {
    call->layer.input = at::constant_pad_nd(call->layer.input.detach(), behind);
  }
  return call;
}

Reading convolution(Arguments a) {
  return convolution_call(
      a, {a[3].toIntVector(), a[4].toIntVector(), a[5].toIntVector(), a[8].toInt(), a[6].toBool()});
}

Reading transposed_conv(Arguments a) {
  return convolution_call(a, {a[3].toIntVector(), a[4].toIntVector(), a[7].toIntVector(),
                              a[6].toInt(), /*is_transposed=*/true});
}

Reading embedding(Arguments a) {
  if (a[3].toBool() || a[4].toBool()) {  // scale_grad_by_freq mixes samples; sparse gradients
    return std::nullopt;
  }
  OperatorCall call = make_call(LayerKind::kEmbedding, a[0].toTensor(), {}, a[1].toTensor());
  call.layer.settings[0] = a[2].toInt();
  return call;
}

Reading normalization(LayerKind kind, const c10::IValue& weight, const c10::IValue& bias,
                      const c10::IValue& input, int64_t setting, double eps) {
  OperatorCall call =
      make_call(kind, tensor_or_none(weight), tensor_or_none(bias), input.toTensor());
  call.layer.settings[0] = setting;
  call.layer.eps = eps;
  return call;
}

Reading layer_norm(Arguments a) {
  const auto dims = static_cast<int64_t>(a[1].toIntVector().size());
  return normalization(LayerKind::kLayerNorm, a[2], a[3], a[0], dims, a[4].toDouble());
}

Reading group_norm(Arguments a) {
  return normalization(LayerKind::kGroupNorm, a[2], a[3], a[0], a[1].toInt(), a[4].toDouble());
}

Reading native_group_norm(Arguments a) {
  return normalization(LayerKind::kGroupNorm, a[1], a[2], a[0], a[6].toInt(), a[7].toDouble());
}

Reading rms_norm(Arguments a) {
  const auto dims = static_cast<int64_t>(a[1].toIntVector().size());
  return normalization(LayerKind::kRmsNorm, a[2], {}, a[0], dims,
                       a[3].isNone() ? -1.0 : a[3].toDouble());
}

Reading batch_norm(Arguments a) {
  Reading call = normalization(LayerKind::kBatchNorm, a[1], a[2], a[0], 0, a[7].toDouble());
  if (!a[5].toBool()) {  // running statistics may be updated before the backward pass
    call->layer.mean = a[3].toTensor().detach().clone();
    call->layer.variance = a[4].toTensor().detach().clone();
  }
  return call;
}

Reading nothing(Arguments) { return std::nullopt; }

std::unordered_map<const char*, LayerOperator> make_table() {
  struct Row {
    const char* name;
    const char* overload;
    LayerOperator entry;
  };
  const Row rows[] = {
      {"aten::linear", "", {&linear, true}},
      {"aten::addmm", "", {&addmm, true}},
      {"aten::matmul", "", {&matmul, true}},
      {"aten::mm", "", {&matmul, true}},
      {"aten::add", "Tensor", {&add, false}},
      {"aten::add_", "Tensor", {&add_, false}},
      {"aten::conv1d", "", {&conv, true}},
      {"aten::conv1d", "padding", {&conv_with_named_padding, true}},
      {"aten::conv2d", "", {&conv, true}},
      {"aten::conv2d", "padding", {&conv_with_named_padding, true}},
      {"aten::conv3d", "", {&conv, true}},
      {"aten::conv3d", "padding", {&conv_with_named_padding, true}},
      {"aten::conv_transpose1d", "", {&transposed_conv, true}},
      {"aten::conv_transpose2d", "input", {&transposed_conv, true}},
      {"aten::conv_transpose3d", "input", {&transposed_conv, true}},
      {"aten::convolution", "", {&convolution, true}},
      {"aten::embedding", "", {&embedding, true}},
      {"aten::layer_norm", "", {&layer_norm, true}},
      {"aten::native_layer_norm", "", {&layer_norm, true}},
      {"aten::group_norm", "", {&group_norm, true}},
      {"aten::native_group_norm", "", {&native_group_norm, true}},
      {"aten::rms_norm", "", {&rms_norm, true}},
      {"aten::batch_norm", "", {&batch_norm, true}},
      {"aten::lstm", "input", {&nothing, true}},
      {"aten::lstm", "data", {&nothing, true}},
      {"aten::gru", "input", {&nothing, true}},
      {"aten::gru", "data", {&nothing, true}},
      {"aten::rnn_tanh", "input", {&nothing, true}},
      {"aten::rnn_tanh", "data", {&nothing, true}},
      {"aten::rnn_relu", "input", {&nothing, true}},
      {"aten::rnn_relu", "data", {&nothing, true}},
  };
  std::unordered_map<const char*, LayerOperator> table;
  for (const auto& [name, overload, entry] : rows) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    table.emplace(handle.schema().name().c_str(), entry);
  }
  return table;
}

}  // namespace

const LayerOperator* find_layer_operator(const char* schema_name) {
  static const auto table = make_table();
  const auto found = table.find(schema_name);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace torchium::gradients::detail
