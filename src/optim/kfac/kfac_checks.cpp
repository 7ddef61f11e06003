#include "optim/kfac/kfac_checks.h"

#include "optim/blocked/block_storage.h"
#include "optim/core/argument_checks.h"

namespace torchium::optim::detail {
namespace {

void check_momentum_buffers(const KfacHyperparameters& h, at::TensorList params,
                            const KfacState& state) {
  std::vector<at::Tensor> with_momentum;
  std::vector<at::Tensor> buffers;
  for (size_t i = 0; i < params.size(); ++i) {
    if (h.parameters[i].momentum > 0.0) {
      with_momentum.push_back(params[i]);
      buffers.push_back(state.momentum_buffers[i]);
    }
  }
  check_state_list(buffers, with_momentum, true, "momentum_buffers");
}

void check_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::ScalarType dtype,
                  const at::Tensor& param, const char* name, size_t layer) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.sizes() == sizes && tensor.scalar_type() == dtype &&
                        tensor.device() == param.device(),
                    name, "[", layer, "] must be ", dtype, sizes, " on ", param.device(), ", got ",
                    tensor.defined()
                        ? c10::str(tensor.scalar_type(), tensor.sizes(), " on ", tensor.device())
                        : std::string("an undefined tensor"));
}

void check_layer(const KfacLayer& layer, size_t index, const KfacHyperparameters& h,
                 at::TensorList params) {
  const at::Tensor& weight = params[layer.weight];
  TORCH_CHECK_VALUE(weight.dim() >= 2 && weight.numel() > 0, "the weight of layer ", index,
                    " has shape ", weight.sizes(), "; a matrix or a convolution kernel is needed");
  TORCH_CHECK_VALUE(
      layer.A.defined() && (layer.A.dim() == 2 || layer.A.dim() == 3) && layer.A.size(0) > 0 &&
          weight.size(0) % layer.A.size(0) == 0,
      "A[", index, "] must be [groups, a, a] or [groups, a] with groups a divisor of ",
      weight.size(0), ", got shape ", layer.A.defined() ? layer.A.sizes() : at::IntArrayRef{});
  const int64_t groups = layer.A.size(0);
  const int64_t o = weight.size(0) / groups;
  const int64_t fan_in = weight.numel() / weight.size(0);
  const int64_t a = layer.A.size(-1) == fan_in + 1 ? fan_in + 1 : fan_in;
  if (layer.bias >= 0) {
    const at::Tensor& bias = params[layer.bias];
    TORCH_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == weight.size(0), "the bias of layer ",
                      index, " has shape ", bias.sizes(), " but its weight has shape ",
                      weight.sizes());
    TORCH_CHECK_VALUE(a == fan_in + 1, "layer ", index, " has a bias, but A[", index,
                      "] has no row for it: its shape is ", layer.A.sizes());
    TORCH_CHECK_VALUE(state_dtype(bias) == state_dtype(weight), "weight and bias of layer ", index,
                      " have dtypes ", weight.scalar_type(), " and ", bias.scalar_type(),
                      "; make them equal");
  }
  const auto check = [&](const at::Tensor& tensor, at::IntArrayRef sizes, const char* name) {
    check_tensor(tensor, sizes, state_dtype(weight), weight, name, index);
  };
  // The number of dimensions of a factor says whether it is a diagonal alone.
  const auto shape = [&](const at::Tensor& factor, int64_t n) {
    return factor.defined() && factor.dim() == 2 ? std::vector<int64_t>{groups, n}
                                                 : std::vector<int64_t>{groups, n, n};
  };
  check(layer.A, shape(layer.A, a), "A");
  check(layer.G, shape(layer.G, o), "G");
  check(layer.A_root, shape(layer.A, a), "A_roots");
  check(layer.G_root, shape(layer.G, o), "G_roots");
  if (h.damping_split == DampingSplit::kExact) {
    check(layer.A_eigenvalues, {groups, a}, "A_eigenvalues");
    check(layer.G_eigenvalues, {groups, o}, "G_eigenvalues");
  }
  check_tensor(layer.factor_updates, {}, at::kFloat, weight, "factor_updates", index);
  check_tensor(layer.root_failures, {2}, at::kInt, weight, "root_failures", index);
}

}  // namespace

void check_kfac_state(const KfacHyperparameters& h, at::TensorList params,
                      const std::vector<KfacLayer>& layers, const KfacState& state) {
  check_parameters(params, state.steps, state.status);
  check_momentum_buffers(h, params, state);
  for (size_t i = 0; i < layers.size(); ++i) {
    check_layer(layers[i], i, h, params);
  }
}

}  // namespace torchium::optim::detail
