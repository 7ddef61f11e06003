#include "gradients/layer_use.h"

#include <c10/util/Exception.h>

namespace torchium::gradients::detail {
namespace {

// The number of dimensions of an input without a sample dimension.
int64_t dims_of_a_sample(const LayerUse& use) {
  switch (use.kind) {
    case LayerKind::kLinear:
      return 1;
    case LayerKind::kConv2d:
      return 3;
    case LayerKind::kLayerNorm:
      return use.settings[kNormalizedDims];
    case LayerKind::kEmbedding:
    case LayerKind::kGroupNorm:
      break;
  }
  return 0;
}

int64_t least_dims(const LayerUse& use) {
  return use.kind == LayerKind::kGroupNorm ? 2 : dims_of_a_sample(use);
}

void check_index(int64_t index, int64_t params, const char* role, size_t use) {
  TORCH_CHECK_VALUE(index >= -1 && index < params, "uses[", use, "]: ", role, " is parameter ",
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
  }
  return "unknown";
}

std::vector<LayerUse> parse_uses(at::TensorList inputs, at::TensorList output_gradients,
                                 at::IntArrayRef rows, at::ArrayRef<double> eps) {
  const size_t count = inputs.size();
  TORCH_CHECK_VALUE(
      output_gradients.size() == count && rows.size() == kUseRowSize * count && eps.size() == count,
      "a use needs an input, an output gradient, ", kUseRowSize, " integers and an eps; got ",
      count, " inputs, ", output_gradients.size(), " output_gradients, ", rows.size(),
      " integers and ", eps.size(), " use_eps");
  std::vector<LayerUse> uses(count);
  for (size_t i = 0; i < count; ++i) {
    const auto row = rows.slice(i * kUseRowSize, kUseRowSize);
    TORCH_CHECK_VALUE(row[0] >= 0 && row[0] <= static_cast<int64_t>(LayerKind::kGroupNorm), "uses[",
                      i, "] has kind ", row[0],
                      "; it must be 0 (linear), 1 (conv2d), 2 (embedding), 3 (layer_norm) or 4 "
                      "(group_norm)");
    LayerUse& use = uses[i];
    use.kind = static_cast<LayerKind>(row[0]);
    use.weight = row[1];
    use.bias = row[2];
    use.micro_batch = row[3];
    for (size_t k = 0; k < use.settings.size(); ++k) {
      use.settings[k] = row[4 + k];
    }
    use.eps = eps[i];
    use.input = inputs[i];
    use.output_gradient = output_gradients[i];
  }
  return uses;
}

void check_use_tensors(const LayerUse& use, size_t index) {
  const bool embedding = use.kind == LayerKind::kEmbedding;
  const auto& input = use.input;
  const auto& gradient = use.output_gradient;
  const auto wanted = [&](const at::Tensor& tensor, bool integer) {
    return tensor.defined() && tensor.layout() == at::kStrided &&
           (integer ? tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt
                    : at::isFloatingType(tensor.scalar_type()));
  };
  TORCH_CHECK_VALUE(wanted(input, embedding), "inputs[", index, "] of a ", name_of(use.kind),
                    " layer is ", input.toString(), "; it must be a dense ",
                    embedding ? "tensor of int64 or int32 indices" : "real floating-point tensor");
  TORCH_CHECK_VALUE(wanted(gradient, false), "output_gradients[", index, "] is ",
                    gradient.toString(), "; it must be a dense real floating-point tensor");
  TORCH_CHECK_VALUE(input.device() == gradient.device(), "inputs[", index, "] is on ",
                    input.device(), " but its output gradient is on ", gradient.device());
  const int64_t dims = input.dim() + (embedding ? 1 : 0);
  TORCH_CHECK_VALUE(input.dim() >= least_dims(use) && gradient.dim() == dims, "inputs[", index,
                    "] of a ", name_of(use.kind), " layer has shape ", input.sym_sizes(),
                    " and its output gradient ", gradient.sym_sizes(),
                    "; pass what the layer received and the gradient of what it returned");
}

void check_uses(const std::vector<LayerUse>& uses, int64_t params) {
  for (size_t i = 0; i < uses.size(); ++i) {
    check_index(uses[i].weight, params, "weight", i);
    check_index(uses[i].bias, params, "bias", i);
    check_use_tensors(uses[i], i);
  }
}

c10::SymInt samples_of(const LayerUse& use) {
  return use.input.dim() == dims_of_a_sample(use) ? c10::SymInt(1) : use.input.sym_size(0);
}

}  // namespace torchium::gradients::detail
