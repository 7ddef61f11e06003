#include "optim/kfac/kfac_checks.h"

#include "optim/blocked/block_storage.h"
#include "optim/core/argument_checks.h"
#include "optim/core/option_checks.h"

namespace torchium::optim::detail {
namespace {

void check_options(const KfacHyperparameters& h, at::TensorList params, const KfacState& state) {
  TORCH_CHECK_VALUE(h.parameters.size() == params.size(),
                    "lrs, momentums, weight_decays and maximize have ", h.parameters.size(),
                    " entries for ", params.size(), " params; pass one each");
  TORCH_CHECK_VALUE(!h.kl_clip.has_value() || *h.kl_clip > 0.0,
                    "kl_clip must be a number above 0 or None, got ", h.kl_clip.value_or(0.0));
  check_choice("root_method", h.root_method, {"auto", "eigh", "newton"});
  TORCH_CHECK_VALUE(!h.found_inf.defined() || h.found_inf.numel() == 1,
                    "found_inf must be one number, got shape ", h.found_inf.sizes());
  std::vector<at::Tensor> with_momentum;
  std::vector<at::Tensor> buffers;
  for (size_t i = 0; i < params.size(); ++i) {
    const KfacParameterOptions& options = h.parameters[i];
    TORCH_CHECK_VALUE(options.lr.defined() && options.lr.numel() == 1, "lrs[", i,
                      "] must be one number");
    check_at_least_zero("momentum", options.momentum);
    if (options.momentum > 0.0) {
      with_momentum.push_back(params[i]);
      if (i < state.momentum_buffers.size()) {
        buffers.push_back(state.momentum_buffers[i]);
      }
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

// The parameter of a layer, which no other layer may have.
const at::Tensor& claim(int64_t index, at::TensorList params, std::vector<bool>& taken,
                        const char* name, size_t layer) {
  TORCH_CHECK_VALUE(index >= 0 && index < static_cast<int64_t>(params.size()), name, " of layer ",
                    layer, " is params[", index, "], but there are ", params.size());
  TORCH_CHECK_VALUE(!taken[index], name, " of layer ", layer, " is params[", index,
                    "], which belongs to another layer already");
  taken[index] = true;
  return params[index];
}

void check_layer(const KfacLayer& layer, size_t index, const KfacHyperparameters& h,
                 at::TensorList params, std::vector<bool>& taken) {
  const at::Tensor& weight = claim(layer.weight, params, taken, "the weight", index);
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
    const at::Tensor& bias = claim(layer.bias, params, taken, "the bias", index);
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
  if (layer.samples > 0) {
    check(layer.A_sum, shape(layer.A, a), "A_sums");
    check(layer.G_sum, shape(layer.G, o), "G_sums");
  }
  TORCH_CHECK_VALUE(layer.samples >= 0 && layer.rows >= layer.samples, "layer ", index, " has ",
                    layer.samples, " samples in ", layer.rows,
                    " rows; there is at least one row a sample");
  check_tensor(layer.factor_updates, {}, at::kFloat, weight, "factor_updates", index);
  check_tensor(layer.root_failures, {2}, at::kInt, weight, "root_failures", index);
  check_at_least_zero("damping", layer.damping);
  check_at_least_zero("eps", layer.floor);
  check_rate("stat_decay", layer.stat_decay, /*one_allowed=*/true);
}

}  // namespace

void check_kfac_arguments(const KfacHyperparameters& h, at::TensorList params, at::TensorList grads,
                          const std::vector<KfacLayer>& layers, const KfacState& state) {
  check_step_arguments(params, grads, state.steps, state.status);
  check_options(h, params, state);
  std::vector<bool> taken(params.size(), false);
  for (size_t i = 0; i < layers.size(); ++i) {
    check_layer(layers[i], i, h, params, taken);
  }
}

}  // namespace torchium::optim::detail
