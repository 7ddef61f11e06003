#include "optim/capture/factor_capture.h"

#include "gradients/capture/operator_capture.h"
#include "gradients/factors/kronecker_factors.h"
#include "optim/blocked/block_storage.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torchium::optim::detail {

using gradients::detail::CapturedCall;
using gradients::detail::LayerCall;
using gradients::detail::LayerKind;
using gradients::detail::OperatorCapture;

constexpr const char* kUsedBothWays = "used as [in, out] and as [out, in]";

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
  // Embeddings that were in no product for a step: their lookups are of no interest.
  std::unordered_set<const at::TensorImpl*> untied;

  void receive(const CapturedCall& captured);
  void receive_product(const CapturedCall& captured, FactorSums& factor_sums);
  void receive_lookup(const CapturedCall& captured, FactorSums& factor_sums);
  FactorLayer& layer_of(const CapturedCall& captured, bool is_looked_up);
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

// [groups, n, n], or the diagonal [groups, n].
at::Tensor zero_factor(const at::Tensor& weight, int64_t groups, int64_t n, bool diagonal) {
  const auto options = weight.options().dtype(state_dtype(weight)).requires_grad(false);
  return diagonal ? at::zeros({groups, n}, options) : at::zeros({groups, n, n}, options);
}

FactorLayer& FactorCapture::Data::layer_of(const CapturedCall& captured, bool is_looked_up) {
  const LayerCall& call = captured.call;
  const auto [found, is_new] = layers.try_emplace(params[call.weight].unsafeGetTensorImpl());
  FactorLayer& layer = found->second;
  if (is_new) {
    layer.is_new = true;
    if (call.bias >= 0 && !is_joint(params[call.bias])) {
      layer.bias = params[call.bias];
    }
    layer.has_bias_row = layer.bias.defined();
    if (call.kind == LayerKind::kConv2d) {
      layer.groups = call.settings[gradients::detail::kGroups];
    }
    layer.is_transposed = captured.has_transposed_weight;
    const auto [a, o] = orders(layer, params[call.weight]);
    layer.diagonal_A = a > max_factor_sizes[call.weight];
    layer.diagonal_G = is_looked_up || o > max_factor_sizes[call.weight];
  }
  if (layer.is_transposed != captured.has_transposed_weight ||
      (layer.is_transposed && is_looked_up)) {
    layer.problem = kUsedBothWays;
  }
  return layer;
}

void FactorCapture::Data::receive(const CapturedCall& captured) {
  const LayerCall& call = captured.call;
  const bool is_lookup = call.kind == LayerKind::kEmbedding;
  if (call.weight < 0 || !due[call.weight] ||
      (!is_lookup && call.kind != LayerKind::kLinear && call.kind != LayerKind::kConv2d)) {
    return;
  }
  FactorSums& factor_sums = sums[params[call.weight].unsafeGetTensorImpl()];
  if (std::any_of(captured.gone_passes.begin(), captured.gone_passes.end(),
                  [&](int64_t pass) { return factor_sums.samples_of_pass.count(pass) != 0; })) {
    factor_sums = FactorSums();
  }
  if (is_lookup) {
    receive_lookup(captured, factor_sums);
  } else {
    receive_product(captured, factor_sums);
  }
}

void FactorCapture::Data::receive_product(const CapturedCall& captured, FactorSums& factor_sums) {
  const LayerCall& call = captured.call;
  const at::Tensor& weight = params[call.weight];
  const bool was_untied = untied.erase(weight.unsafeGetTensorImpl()) > 0;
  const FactorLayer& layer = layer_of(captured, was_untied || factor_sums.lookup_A.defined());
  if (!layer.problem.empty()) {
    return;
  }
  if (!factor_sums.A.defined()) {
    const auto [a, o] = orders(layer, weight);
    factor_sums.A = zero_factor(weight, layer.groups, a, layer.diagonal_A);
    factor_sums.G = zero_factor(weight, layer.groups, o, layer.diagonal_G);
  }
  const at::Tensor matrix = layer.matrix(weight);
  gradients::detail::update_kronecker_factors_(factor_sums.A, factor_sums.G, call, matrix.sizes());
  int64_t& samples = factor_sums.samples_of_pass[call.micro_batch];
  samples = std::max(samples, gradients::detail::samples_of(call).expect_int());
  factor_sums.rows += call.output_gradient.numel() / matrix.size(0);
}

void FactorCapture::Data::receive_lookup(const CapturedCall& captured, FactorSums& factor_sums) {
  const LayerCall& call = captured.call;
  const at::Tensor& weight = params[call.weight];
  const auto known = layers.find(weight.unsafeGetTensorImpl());
  if (known != layers.end()) {
    FactorLayer& layer = known->second;
    layer.diagonal_G = layer.diagonal_G || layer.is_new;
    layer.problem = layer.is_transposed ? kUsedBothWays : layer.problem;
  }
  if (untied.count(weight.unsafeGetTensorImpl()) != 0 ||
      (known != layers.end() && !known->second.problem.empty())) {
    return;
  }
  if (!factor_sums.lookup_A.defined()) {
    const int64_t width = weight.size(1);
    const bool diagonal =
        known == layers.end() ? width > max_factor_sizes[call.weight] : known->second.diagonal_A;
    factor_sums.lookup_A = zero_factor(weight, 1, width, diagonal);
    factor_sums.lookup_counts = zero_factor(weight, 1, weight.size(0), /*diagonal=*/true);
  }
  gradients::detail::update_kronecker_factors_(factor_sums.lookup_A, factor_sums.lookup_counts,
                                               call, weight.sizes());
  factor_sums.samples_of_pass.try_emplace(call.micro_batch, 0);
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
      params, [data = data_](const CapturedCall& captured) { data->receive(captured); },
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
  if (found == data_->sums.end() || !found->second.A.defined()) {
    return nullptr;
  }
  FactorSums& sums = found->second;
  if (sums.G.dim() == 3 && layer(weight)->diagonal_G) {  // looked up after the first product
    sums.G = sums.G.diagonal(0, -2, -1).contiguous();
  }
  if (sums.lookup_A.defined() && sums.rows > 0) {
    gradients::detail::add_lookup_factors_(sums.A, sums.G, sums.rows, sums.lookup_A,
                                           sums.lookup_counts);
    sums.lookup_A.reset();
    sums.lookup_counts.reset();
  }
  return &sums;
}

const FactorLayer* FactorCapture::layer(const at::Tensor& weight) const {
  const auto found = data_->layers.find(weight.unsafeGetTensorImpl());
  return found == data_->layers.end() ? nullptr : &found->second;
}

bool FactorCapture::is_only_looked_up(const at::Tensor& param) const {
  const auto found = data_->sums.find(param.unsafeGetTensorImpl());
  return layer(param) == nullptr &&
         (data_->untied.count(param.unsafeGetTensorImpl()) != 0 ||
          (found != data_->sums.end() && found->second.lookup_A.defined()));
}

bool FactorCapture::is_joint_bias(const at::Tensor& param) const { return data_->is_joint(param); }

void FactorCapture::set_layer(const at::Tensor& weight, FactorLayer layer) {
  data_->layers[weight.unsafeGetTensorImpl()] = std::move(layer);
}

void FactorCapture::forget_layers() {
  data_->layers.clear();
  data_->untied.clear();
}

void FactorCapture::forget() {
  for (const auto& [weight, sums] : data_->sums) {
    if (sums.lookup_A.defined() && data_->layers.count(weight) == 0) {
      data_->untied.insert(weight);
    }
  }
  for (auto& entry : data_->layers) {
    entry.second.is_new = false;
  }
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
