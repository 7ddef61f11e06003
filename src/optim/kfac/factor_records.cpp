#include "optim/kfac/factor_records.h"

#include "optim/core/parameter_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

using gradients::detail::LayerCall;
using gradients::detail::LayerKind;
using gradients::detail::UpdatedFactors;
using gradients::detail::WeightSharing;

constexpr const char* kUsedBothWays = "used as [in, out] and as [out, in]";

namespace {

// [groups, n, n], or the diagonal [groups, n]; its values are not set.
at::Tensor empty_factor(const at::Tensor& weight, int64_t groups, int64_t n, bool diagonal) {
  const auto options = weight.options().dtype(state_dtype(weight)).requires_grad(false);
  return diagonal ? at::empty({groups, n}, options) : at::empty({groups, n, n}, options);
}

UpdatedFactors factors_of(const CurvatureColumn* column) {
  return column == nullptr || column->is_first ? UpdatedFactors::kBoth
                                               : UpdatedFactors::kOfGradients;
}

}  // namespace

int64_t FactorSums::samples() const {
  int64_t total = 0;
  for (const auto& [pass, samples] : samples_of_pass) {
    total += samples;
  }
  return total;
}

const at::TensorImpl* FactorRecords::weight_beside(const at::Tensor& bias) const {
  if (!bias.defined()) {
    return nullptr;
  }
  const auto found = std::find_if(layers_.begin(), layers_.end(), [&](const auto& entry) {
    return entry.second.bias.is_same(bias);
  });
  return found == layers_.end() ? nullptr : found->first;
}

FactorLayout FactorRecords::layout(const FactorWeight& weight, const FactorLayer& layer) const {
  FactorLayout layout;
  if (weight.A.defined() && weight.G.defined() && factors_fit(weight.param, weight.A, weight.G)) {
    layout = layout_of_factors(weight.param, weight.A, weight.G);
    if (layout.is_transposed != layer.is_transposed) {  // a square weight
      layout.is_transposed = layer.is_transposed;
    }
    return layout;
  }
  layout.groups = layer.groups;
  layout.has_bias_row = layer.bias.defined();
  layout.is_transposed = layer.is_transposed;
  layout.diagonal_A = layout.order_A(weight.param) > weight.max_factor_size;
  layout.diagonal_G = layer.is_tied || layout.order_G(weight.param) > weight.max_factor_size;
  return layout;
}

void FactorRecords::record(const FactorWeight& weight, const LayerCall& call,
                           const FactorLayer& seen, const CurvatureColumn* column) {
  if (call.kind == LayerKind::kEmbedding) {
    record_lookup(weight, call, column);
  } else if (call.kind == LayerKind::kLinear || call.kind == LayerKind::kConv2d) {
    record_product(weight, call, seen, column);
  }
}

void FactorRecords::record_product(const FactorWeight& weight, const LayerCall& call,
                                   const FactorLayer& seen, const CurvatureColumn* column) {
  const auto* impl = weight.param.unsafeGetTensorImpl();
  FactorSums& sums = sums_[impl];
  const bool is_looked_up = untied_.erase(impl) > 0 || sums.lookup_A.defined();
  const auto [found, is_new] = layers_.try_emplace(impl, seen);
  FactorLayer& layer = found->second;
  if (is_new) {
    layer.bias.reset();
    layer.bias = is_joint_bias(seen.bias) ? at::Tensor() : seen.bias;
    layer.is_tied = seen.is_tied || is_looked_up;
  }
  if (layer.is_transposed != seen.is_transposed || (layer.is_transposed && is_looked_up)) {
    layer.problem = kUsedBothWays;
  }
  if (!layer.problem.empty()) {
    return;
  }
  const FactorLayout layout = this->layout(weight, layer);
  const bool is_first = !sums.A.defined();
  if (is_first) {
    sums.A =
        empty_factor(weight.param, layout.groups, layout.order_A(weight.param), layout.diagonal_A);
    sums.G =
        empty_factor(weight.param, layout.groups, layout.order_G(weight.param), layout.diagonal_G);
  }
  const at::Tensor matrix = layout.matrix(weight.param);
  gradients::detail::update_kronecker_factors_(sums.A, sums.G, call, matrix.sizes(),
                                               /*accumulate=*/!is_first, weight.sharing,
                                               factors_of(column));
  if (factors_of(column) == UpdatedFactors::kOfGradients) {
    return;
  }
  const int64_t N = gradients::detail::samples_of(call).expect_int();
  int64_t& samples = sums.samples_of_pass[call.micro_batch];
  samples = std::max(samples, column == nullptr ? N : column->samples);
  sums.rows +=
      weight.sharing == WeightSharing::kReduce ? N : call.output_gradient.numel() / matrix.size(0);
}

void FactorRecords::record_lookup(const FactorWeight& weight, const LayerCall& call,
                                  const CurvatureColumn* column) {
  const auto* impl = weight.param.unsafeGetTensorImpl();
  const auto known = layers_.find(impl);
  if (known != layers_.end()) {
    FactorLayer& layer = known->second;
    layer.is_tied = true;
    layer.problem = layer.is_transposed ? kUsedBothWays : layer.problem;
  }
  if (untied_.count(impl) != 0 || (known != layers_.end() && !known->second.problem.empty())) {
    return;
  }
  FactorSums& sums = sums_[impl];
  const bool is_first = !sums.lookup_A.defined();
  if (is_first) {
    const int64_t width = weight.param.size(1);
    const bool diagonal = known == layers_.end() ? width > weight.max_factor_size
                                                 : layout(weight, known->second).diagonal_A;
    sums.lookup_A = empty_factor(weight.param, 1, width, diagonal);
    sums.lookup_counts = empty_factor(weight.param, 1, weight.param.size(0), /*diagonal=*/true);
  }
  gradients::detail::update_kronecker_factors_(sums.lookup_A, sums.lookup_counts, call,
                                               weight.param.sizes(), /*accumulate=*/!is_first,
                                               WeightSharing::kExpand, factors_of(column));
  sums.samples_of_pass.try_emplace(call.micro_batch, 0);
}

void FactorRecords::declare(const at::Tensor& weight, FactorLayer layer) {
  layers_[weight.unsafeGetTensorImpl()] = std::move(layer);
}

void FactorRecords::drop(const at::Tensor& weight, at::IntArrayRef passes) {
  const auto found = sums_.find(weight.unsafeGetTensorImpl());
  if (found == sums_.end()) {
    return;
  }
  const auto& of_passes = found->second.samples_of_pass;
  if (passes.empty() || std::any_of(passes.begin(), passes.end(),
                                    [&](int64_t pass) { return of_passes.count(pass) != 0; })) {
    sums_.erase(found);
  }
}

void FactorRecords::forget() {
  for (const auto& [weight, sums] : sums_) {
    if (sums.lookup_A.defined() && layers_.count(weight) == 0) {
      untied_.insert(weight);
    }
  }
  sums_.clear();
}

FactorSums* FactorRecords::sums(const FactorWeight& weight) {
  const auto found = sums_.find(weight.param.unsafeGetTensorImpl());
  if (found == sums_.end() || !found->second.A.defined()) {
    return nullptr;
  }
  FactorSums& sums = found->second;
  const FactorLayer* known = layer(weight.param);
  if (sums.G.dim() == 3 && known != nullptr && layout(weight, *known).diagonal_G) {
    sums.G = sums.G.diagonal(0, -2, -1).contiguous();  // looked up after the first product
  }
  if (sums.lookup_A.defined() && sums.rows > 0) {
    gradients::detail::add_lookup_factors_(sums.A, sums.G, sums.rows, sums.lookup_A,
                                           sums.lookup_counts);
    sums.lookup_A.reset();
    sums.lookup_counts.reset();
  }
  return &sums;
}

const FactorLayer* FactorRecords::layer(const at::Tensor& weight) const {
  const auto found = layers_.find(weight.unsafeGetTensorImpl());
  return found == layers_.end() ? nullptr : &found->second;
}

bool FactorRecords::is_only_looked_up(const at::Tensor& param) const {
  const auto* impl = param.unsafeGetTensorImpl();
  const auto found = sums_.find(impl);
  return layers_.count(impl) == 0 &&
         (untied_.count(impl) != 0 || (found != sums_.end() && found->second.lookup_A.defined()));
}

}  // namespace torchium::optim::detail
