#include "optim/factor_capture.h"

#include "gradients/kronecker_factors.h"
#include "gradients/operator_capture.h"
#include "optim/stacks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace torchium::optim::detail {

using gradients::detail::CapturedUse;
using gradients::detail::LayerKind;
using gradients::detail::LayerUse;
using gradients::detail::OperatorCapture;

int64_t FactorSums::samples() const {
  int64_t total = 0;
  for (const auto& [pass, samples] : samples_of_pass) {
    total += samples;
  }
  return total;
}

at::Tensor FactorLayer::matrix(const at::Tensor& weight) const {
  return is_transposed ? weight.detach().t() : weight;
}

// Shared with the capture, whose backward passes may run on other threads.
struct FactorCapture::Data {
  std::vector<at::Tensor> params;
  std::vector<bool> due;
  std::vector<int64_t> max_factor_sizes;
  std::unordered_map<const at::TensorImpl*, FactorLayer> layers;
  std::unordered_map<const at::TensorImpl*, FactorSums> sums;

  void receive(const CapturedUse& captured);
  FactorLayer& layer_of(const CapturedUse& captured);
  bool is_joint(const at::Tensor& bias) const;
};

bool FactorCapture::Data::is_joint(const at::Tensor& bias) const {
  return std::any_of(layers.begin(), layers.end(),
                     [&](const auto& entry) { return entry.second.bias.is_same(bias); });
}

// Order of A and of G.
std::pair<int64_t, int64_t> orders(const FactorLayer& layer, const at::Tensor& weight) {
  const at::Tensor matrix = layer.matrix(weight);
  return {matrix.numel() / matrix.size(0) + (layer.has_bias_row ? 1 : 0),
          matrix.size(0) / layer.groups};
}

FactorLayer& FactorCapture::Data::layer_of(const CapturedUse& captured) {
  const LayerUse& use = captured.use;
  const auto [found, is_new] = layers.try_emplace(params[use.weight].unsafeGetTensorImpl());
  FactorLayer& layer = found->second;
  if (is_new) {
    if (use.bias >= 0 && !is_joint(params[use.bias])) {
      layer.bias = params[use.bias];
    }
    layer.has_bias_row = layer.bias.defined();
    if (use.kind == LayerKind::kConv2d) {
      layer.groups = use.settings[gradients::detail::kGroups];
    }
    layer.is_transposed = captured.has_transposed_weight;
    const auto [a, o] = orders(layer, params[use.weight]);
    layer.diagonal_A = a > max_factor_sizes[use.weight];
    layer.diagonal_G = o > max_factor_sizes[use.weight];
  }
  if (use.kind == LayerKind::kEmbedding) {
    layer.problem = "looked up as an embedding";
  } else if (layer.is_transposed != captured.has_transposed_weight) {
    layer.problem = "used as [in, out] and as [out, in]";
  }
  return layer;
}

void FactorCapture::Data::receive(const CapturedUse& captured) {
  const LayerUse& use = captured.use;
  if (use.weight < 0 || !due[use.weight]) {
    return;
  }
  const at::Tensor& weight = params[use.weight];
  if (use.kind != LayerKind::kLinear && use.kind != LayerKind::kConv2d) {
    if (use.kind == LayerKind::kEmbedding) {
      layer_of(captured);
    }
    return;
  }
  const FactorLayer& layer = layer_of(captured);
  if (!layer.problem.empty()) {
    return;
  }
  FactorSums& factor_sums = sums[weight.unsafeGetTensorImpl()];
  const bool is_gone =
      std::any_of(captured.gone_passes.begin(), captured.gone_passes.end(),
                  [&](int64_t pass) { return factor_sums.samples_of_pass.count(pass) != 0; });
  if (!factor_sums.A.defined() || is_gone) {
    const auto [a, o] = orders(layer, weight);
    const auto options = weight.options().dtype(state_dtype(weight)).requires_grad(false);
    const auto zeros = [&](int64_t n, bool diagonal) {
      return diagonal ? at::zeros({layer.groups, n}, options)
                      : at::zeros({layer.groups, n, n}, options);
    };
    factor_sums = FactorSums();
    factor_sums.A = zeros(a, layer.diagonal_A);
    factor_sums.G = zeros(o, layer.diagonal_G);
  }
  const at::Tensor matrix = layer.matrix(weight);
  gradients::detail::update_kronecker_factors_(factor_sums.A, factor_sums.G, use, matrix.sizes());
  int64_t& samples = factor_sums.samples_of_pass[use.micro_batch];
  samples = std::max(samples, gradients::detail::samples_of(use).expect_int());
  factor_sums.rows += use.output_gradient.numel() / matrix.size(0);
}

FactorCapture::FactorCapture() : data_(std::make_shared<Data>()) {}

FactorCapture::~FactorCapture() = default;

void FactorCapture::watch(const std::vector<at::Tensor>& params) {
  if (capture_ != nullptr && capture_->watches(params)) {
    return;
  }
  capture_ = nullptr;
  data_->params = params;
  data_->due.assign(params.size(), false);
  capture_ = std::make_unique<OperatorCapture>(
      params, [data = data_](const CapturedUse& captured) { data->receive(captured); },
      /*takes_transposed=*/true);
}

void FactorCapture::set_due(const std::vector<bool>& due,
                            const std::vector<int64_t>& max_factor_sizes) {
  data_->due = due;
  data_->max_factor_sizes = max_factor_sizes;
  capture_->set_enabled(std::any_of(due.begin(), due.end(), [](bool d) { return d; }));
}

FactorSums* FactorCapture::sums(const at::Tensor& weight) const {
  const auto found = data_->sums.find(weight.unsafeGetTensorImpl());
  return found == data_->sums.end() ? nullptr : &found->second;
}

const FactorLayer* FactorCapture::layer(const at::Tensor& weight) const {
  const auto found = data_->layers.find(weight.unsafeGetTensorImpl());
  return found == data_->layers.end() ? nullptr : &found->second;
}

bool FactorCapture::is_joint_bias(const at::Tensor& param) const { return data_->is_joint(param); }

void FactorCapture::set_layer(const at::Tensor& weight, FactorLayer layer) {
  data_->layers[weight.unsafeGetTensorImpl()] = std::move(layer);
}

void FactorCapture::forget_layers() { data_->layers.clear(); }

void FactorCapture::forget() {
  data_->sums.clear();
  if (capture_ != nullptr) {
    capture_->forget();
  }
}

void FactorCapture::raise_error() {
  if (capture_ != nullptr) {
    capture_->raise_error();
  }
}

int64_t FactorCapture::processes() const { return capture_ == nullptr ? 1 : capture_->processes(); }

bool FactorCapture::is_used_otherwise(const at::Tensor& param) const {
  return capture_ != nullptr && param.defined() &&
         capture_->is_used_otherwise(capture_->position(param));
}

}  // namespace torchium::optim::detail
