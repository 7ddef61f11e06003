#include "gradients/jacobian/dense_rows.h"

#include "linalg/common/precision.h"

#include <ATen/ATen.h>

namespace torchium::gradients::detail {
namespace {

// The dimensions of a bias in the output.
at::IntArrayRef parameter_dims(const LayerCall& call, const at::Tensor& output) {
  switch (call.kind) {
    case LayerKind::kConv2d:
    case LayerKind::kConv3d:
      return output.sizes().slice(output.dim() - spatial_dims(call) - 1, 1);
    case LayerKind::kGroupNorm:
    case LayerKind::kBatchNorm:
      return output.sizes().slice(1, 1);
    case LayerKind::kLayerNorm:
    case LayerKind::kRmsNorm:
      return output.sizes().slice(output.dim() - call.settings[kNormalizedDims]);
    case LayerKind::kLinear:
    case LayerKind::kEmbedding:
    case LayerKind::kRegistered:
      break;
  }
  return output.sizes().slice(output.dim() - 1);
}

void check_shape(const LayerCall& call, at::IntArrayRef shape, const char* role,
                 size_t call_index) {
  const auto expected = parameter_dims(call, call.output_gradient);
  TORCH_CHECK_VALUE(expected == shape, "calls[", call_index, "]: the ", role, " of a ",
                    name_of(call.kind), " layer has shape ", shape, ", but its output gradient ",
                    call.output_gradient.sizes(), " belongs to one of shape ", expected);
}

}  // namespace

at::Tensor sum_over_positions(const LayerCall& call, const at::Tensor& output) {
  switch (call.kind) {
    case LayerKind::kLinear:
      if (output.dim() <= 2) {
        return output.dim() == 1 ? output.unsqueeze(0) : output;
      }
      return output.flatten(1, output.dim() - 2).sum(1);
    case LayerKind::kConv2d:
    case LayerKind::kConv3d: {
      const at::Tensor sums = output.flatten(-static_cast<int64_t>(spatial_dims(call))).sum(-1);
      return sums.dim() == 1 ? sums.unsqueeze(0) : sums;
    }
    case LayerKind::kGroupNorm:
    case LayerKind::kBatchNorm:
      return output.dim() == 2 ? output : output.flatten(2).sum(2);
    case LayerKind::kLayerNorm:
    case LayerKind::kRmsNorm: {
      const int64_t dims = call.settings[kNormalizedDims];
      if (output.dim() == dims) {
        return output.unsqueeze(0);
      }
      return output.dim() == dims + 1 ? output : output.flatten(1, output.dim() - dims - 1).sum(1);
    }
    case LayerKind::kEmbedding:
    case LayerKind::kRegistered:
      break;
  }
  TORCH_CHECK_VALUE(false, "a layer of kind ", name_of(call.kind), " has no bias");
}

double eps_of_norm(const LayerCall& call) {
  const bool is_double = call.input.scalar_type() == at::kDouble;
  const bool is_default = call.kind == LayerKind::kRmsNorm && call.eps < 0;
  return is_default ? linalg::detail::epsilon_of(is_double ? at::kDouble : at::kFloat) : call.eps;
}

at::Tensor normalized_input(const LayerCall& call, at::ScalarType dtype) {
  const at::Tensor input = call.input.to(dtype);
  if (call.kind == LayerKind::kGroupNorm) {
    return at::group_norm(input, call.settings[kNumGroups], {}, {}, call.eps);
  }
  if (call.kind == LayerKind::kBatchNorm) {
    const bool has_statistics = call.mean.defined();
    const auto as_input = [&](const at::Tensor& statistic) {
      return has_statistics ? statistic.to(dtype) : at::Tensor();
    };
    return at::batch_norm(input, {}, {}, as_input(call.mean), as_input(call.variance),
                          /*training=*/!has_statistics, /*momentum=*/0.0, call.eps,
                          /*cudnn_enabled=*/false);
  }
  const int64_t dims = call.settings[kNormalizedDims];
  const auto shape = input.sizes().slice(input.dim() - dims);
  if (call.kind == LayerKind::kRmsNorm) {
    return at::rms_norm(input, shape, {}, eps_of_norm(call));
  }
  return at::layer_norm(input, shape, {}, {}, call.eps);
}

void check_norm(const LayerCall& call, at::IntArrayRef shape, size_t call_index) {
  check_shape(call, shape, "weight", call_index);
  TORCH_CHECK_VALUE(call.input.sizes() == call.output_gradient.sizes(), "calls[", call_index,
                    "]: a ", name_of(call.kind), " layer got inputs of shape ", call.input.sizes(),
                    " and output_gradients of shape ", call.output_gradient.sizes(),
                    "; they must be the same");
}

void check_bias(const LayerCall& call, at::IntArrayRef shape, size_t call_index) {
  check_shape(call, shape, "bias", call_index);
}

at::Tensor bias_rows(const LayerCall& call, at::IntArrayRef shape, at::ScalarType dtype,
                     size_t call_index) {
  check_bias(call, shape, call_index);
  return sum_over_positions(call, call.output_gradient.to(dtype));
}

at::Tensor norm_weight_rows(const LayerCall& call, at::IntArrayRef shape, at::ScalarType dtype,
                            size_t call_index) {
  check_norm(call, shape, call_index);
  return sum_over_positions(call, normalized_input(call, dtype) * call.output_gradient.to(dtype));
}

}  // namespace torchium::gradients::detail
