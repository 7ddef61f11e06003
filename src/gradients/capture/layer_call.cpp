#include "gradients/capture/layer_call.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torchium::gradients::detail {
namespace {

// The number of dimensions of an input without a sample dimension.
int64_t dims_of_a_sample(const LayerCall& call) {
  switch (call.kind) {
    case LayerKind::kLinear:
      return 1;
    case LayerKind::kConv2d:
    case LayerKind::kConv3d:
      return static_cast<int64_t>(spatial_dims(call)) + 1;
    case LayerKind::kLayerNorm:
    case LayerKind::kRmsNorm:
      return call.settings[kNormalizedDims];
    case LayerKind::kEmbedding:
    case LayerKind::kGroupNorm:
    case LayerKind::kBatchNorm:
    case LayerKind::kRegistered:
      break;
  }
  return 0;
}

int64_t least_dims(const LayerCall& call) {
  const bool has_channels =
      call.kind == LayerKind::kGroupNorm || call.kind == LayerKind::kBatchNorm;
  return has_channels ? 2 : dims_of_a_sample(call);
}

void check_index(int64_t index, int64_t params, const char* role, size_t call) {
  TORCH_CHECK_VALUE(index >= -1 && index < params, "calls[", call, "]: ", role, " is parameter ",
                    index, " of ", params, "; pass an index in params, or -1 for none");
}

}  // namespace

const char* name_of(LayerKind kind) {
  switch (kind) {
    case LayerKind::kLinear:
      return "linear";
    case LayerKind::kConv2d:
      return "conv2d";
    case LayerKind::kEmbedding:
      return "embedding";
    case LayerKind::kLayerNorm:
      return "layer_norm";
    case LayerKind::kGroupNorm:
      return "group_norm";
    case LayerKind::kConv3d:
      return "conv3d";
    case LayerKind::kRmsNorm:
      return "rms_norm";
    case LayerKind::kBatchNorm:
      return "batch_norm";
    case LayerKind::kRegistered:
      return "registered";
  }
  return "unknown";
}

ConvolutionSettings convolution_settings(const LayerCall& call) {
  const size_t n = spatial_dims(call);
  const at::IntArrayRef all(call.settings);
  return {all.slice(0, n), all.slice(n, n), all.slice(2 * n, n), all[3 * n], all[3 * n + 1] != 0};
}

int64_t groups_of(const LayerCall& call) {
  return is_convolution(call) ? convolution_settings(call).groups : 1;
}

LayerCall call_from_row(const int64_t* row) {
  LayerCall call;
  call.kind = static_cast<LayerKind>(row[0]);
  call.weight = row[1];
  call.bias = row[2];
  call.micro_batch = row[3];
  std::copy_n(row + 4, call.settings.size(), call.settings.begin());
  return call;
}

std::vector<LayerCall> parse_calls(at::TensorList inputs, at::TensorList output_gradients,
                                   at::IntArrayRef rows, at::ArrayRef<double> eps) {
  const size_t count = inputs.size();
  TORCH_CHECK_VALUE(output_gradients.size() == count && rows.size() == kCallRowSize * count &&
                        eps.size() == count,
                    "a call needs an input, an output gradient, ", kCallRowSize,
                    " integers and an eps; got ", count, " inputs, ", output_gradients.size(),
                    " output_gradients, ", rows.size(), " integers and ", eps.size(), " call_eps");
  std::vector<LayerCall> calls(count);
  for (size_t i = 0; i < count; ++i) {
    const auto row = rows.slice(i * kCallRowSize, kCallRowSize);
    TORCH_CHECK_VALUE(row[0] >= 0 && row[0] <= static_cast<int64_t>(kLastKind), "calls[", i,
                      "] has kind ", row[0],
                      "; it must be 0 (linear), 1 (conv2d), 2 (embedding), 3 (layer_norm), 4 "
                      "(group_norm), 5 (conv3d) or 6 (rms_norm)");
    LayerCall& call = calls[i];
    call = call_from_row(row.data());
    call.eps = eps[i];
    call.input = inputs[i];
    call.output_gradient = output_gradients[i];
  }
  return calls;
}

void check_call_tensors(const LayerCall& call, size_t index) {
  const bool embedding = call.kind == LayerKind::kEmbedding;
  const auto& input = call.input;
  const auto& gradient = call.output_gradient;
  const auto wanted = [&](const at::Tensor& tensor, bool integer) {
    return tensor.defined() && tensor.layout() == at::kStrided &&
           (integer ? tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt
                    : at::isFloatingType(tensor.scalar_type()));
  };
  TORCH_CHECK_VALUE(wanted(input, embedding), "inputs[", index, "] of a ", name_of(call.kind),
                    " layer is ", input.toString(), "; it must be a dense ",
                    embedding ? "tensor of int64 or int32 indices" : "real floating-point tensor");
  TORCH_CHECK_VALUE(wanted(gradient, false), "output_gradients[", index, "] is ",
                    gradient.toString(), "; it must be a dense real floating-point tensor");
  TORCH_CHECK_VALUE(input.device() == gradient.device(), "inputs[", index, "] is on ",
                    input.device(), " but its output gradient is on ", gradient.device());
  const int64_t dims = input.dim() + (embedding ? 1 : 0);
  TORCH_CHECK_VALUE(input.dim() >= least_dims(call) && gradient.dim() == dims, "inputs[", index,
                    "] of a ", name_of(call.kind), " layer has shape ", input.sym_sizes(),
                    " and its output gradient ", gradient.sym_sizes(),
                    "; pass what the layer received and the gradient of what it returned");
}

void check_calls(const std::vector<LayerCall>& calls, int64_t params) {
  for (size_t i = 0; i < calls.size(); ++i) {
    check_index(calls[i].weight, params, "weight", i);
    check_index(calls[i].bias, params, "bias", i);
    check_call_tensors(calls[i], i);
  }
}

c10::SymInt samples_of(const LayerCall& call) {
  return has_sample_dimension(call) ? call.input.sym_size(0) : c10::SymInt(1);
}

int64_t samples_of(const LayerCall& call, at::IntArrayRef input) {
  return static_cast<int64_t>(input.size()) == dims_of_a_sample(call) ? 1 : input[0];
}

bool has_sample_dimension(const LayerCall& call) {
  return call.input.dim() != dims_of_a_sample(call);
}

}  // namespace torchium::gradients::detail
