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

// Shared with the capture, whose backward passes may run on other threads.
struct FactorCapture::Data {
  std::vector<at::Tensor> params;
  std::vector<bool> due;
  std::unordered_map<const at::TensorImpl*, FactorLayer> layers;
  std::unordered_map<const at::TensorImpl*, FactorSums> sums;

  void receive(const CapturedUse& captured);
  FactorLayer& layer_of(const LayerUse& use);
  bool is_joint(const at::Tensor& bias) const;
};

bool FactorCapture::Data::is_joint(const at::Tensor& bias) const {
  return std::any_of(layers.begin(), layers.end(),
                     [&](const auto& entry) { return entry.second.bias.is_same(bias); });
}

FactorLayer& FactorCapture::Data::layer_of(const LayerUse& use) {
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
      layer_of(use).is_embedding = true;
    }
    return;
  }
  const FactorLayer& layer = layer_of(use);
  FactorSums& factor_sums = sums[weight.unsafeGetTensorImpl()];
  const bool is_gone =
      std::any_of(captured.gone_passes.begin(), captured.gone_passes.end(),
                  [&](int64_t pass) { return factor_sums.samples_of_pass.count(pass) != 0; });
  if (!factor_sums.A.defined() || is_gone) {
    const int64_t fan_out = weight.size(0) / layer.groups;
    const int64_t order = weight.numel() / weight.size(0) + (layer.has_bias_row ? 1 : 0);
    const auto options = weight.options().dtype(state_dtype(weight)).requires_grad(false);
    factor_sums = FactorSums();
    factor_sums.A = at::zeros({layer.groups, order, order}, options);
    factor_sums.G = at::zeros({layer.groups, fan_out, fan_out}, options);
  }
  gradients::detail::update_kronecker_factors_(factor_sums.A, factor_sums.G, use, weight.sizes());
  int64_t& samples = factor_sums.samples_of_pass[use.micro_batch];
  samples = std::max(samples, gradients::detail::samples_of(use).expect_int());
  factor_sums.rows += use.output_gradient.numel() / weight.size(0);
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
      params, [data = data_](const CapturedUse& captured) { data->receive(captured); });
}

void FactorCapture::set_due(const std::vector<bool>& due) {
  data_->due = due;
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
