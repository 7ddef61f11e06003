#include "optim/kfac/factors/factor_records.h"

#include "optim/core/parameter_state.h"
#include "optim/kfac/fallback_reasons.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

using gradients::detail::LayerCall;
using gradients::detail::LayerKind;
using gradients::detail::StructuredSums;
using gradients::detail::UpdatedFactors;
using gradients::detail::WeightSharing;

namespace {

// Its values are not set.
at::Tensor empty_sum(const at::Tensor& weight, at::IntArrayRef sizes) {
  return at::empty(sizes, weight.options().dtype(state_dtype(weight)).requires_grad(false));
}

// K and C, for Toeplitz sums.
StructuredSums structured_sums(const FactorWeight& weight) {
  if (!weight.A.defined() || !weight.G.defined() ||
      !factors_fit(weight.param, weight.A, weight.G)) {
    return {};  // the step refuses factors of another shape
  }
  const auto as_sums = [&](const at::Tensor& factor) {  // state follows its parameter later
    const bool is_needed = linalg::detail::structure_of(factor) == Structure::kToeplitz;
    return is_needed ? factor.to(weight.param.device(), state_dtype(weight.param)) : at::Tensor();
  };
  return {as_sums(weight.A), as_sums(weight.G)};
}

// A bias that is not trained is not seen.
bool has_another_bias(const FactorLayer& layer, const FactorLayer& seen) {
  return layer.bias.defined() && !layer.bias.is_same(seen.bias) &&
         (seen.bias.defined() || layer.bias.requires_grad());
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

std::vector<at::Tensor> FactorSums::of_gradients() const {
  std::vector<at::Tensor> tensors{blocks.defined() ? blocks : A_is_of_gradients ? A : G};
  for (const at::Tensor& tensor : {lookup_A, moments}) {
    if (tensor.defined()) {
      tensors.push_back(tensor);
    }
  }
  return tensors;
}

void FactorSums::count_samples(const LayerCall& call, const CurvatureColumn* column) {
  const int64_t N = gradients::detail::samples_of(call).expect_int();
  int64_t& samples = samples_of_pass[call.micro_batch];
  if (column == nullptr && samples != 0 && samples != N) {
    different_samples = std::minmax(samples, N);
  }
  samples = std::max(samples, column == nullptr ? N : column->samples);
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

bool FactorRecords::is_lone_bias(const at::Tensor& param) const {
  return std::any_of(layers_.begin(), layers_.end(),
                     [&](const auto& entry) { return param.is_same(entry.second.lone_bias); });
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
  layout.structures = weight.structures;
  const auto limit = [&](Structure& structure, int64_t order) {
    if (structure == Structure::kDense && order > weight.max_factor_size) {
      structure = Structure::kDiagonal;
    }
  };
  limit(layout.structures.A, layout.order_A(weight.param));
  limit(layout.structures.G, layout.order_G(weight.param));
  if (layer.is_tied) {
    layout.structures.G = Structure::kDiagonal;
  }
  return layout;
}

void FactorRecords::record(const FactorWeight& weight, const LayerCall& call,
                           const FactorLayer& seen, const CurvatureColumn* column) {
  if (call.kind == LayerKind::kEmbedding) {
    record_lookup(weight, call, column);
  } else if (is_product(call)) {
    record_product(weight, call, seen, column);
  } else if (gradients::detail::is_norm(call)) {
    record_norm(weight, call, seen, column);
  }
}

void FactorRecords::record_product(const FactorWeight& weight, const LayerCall& call,
                                   const FactorLayer& seen, const CurvatureColumn* column) {
  const auto* impl = weight.param.unsafeGetTensorImpl();
  const auto [found, is_new] = layers_.try_emplace(impl);
  FactorLayer& layer = found->second;
  if (is_new || layer.is_table) {
    const at::Tensor bias = is_joint_bias(seen.bias) ? at::Tensor() : seen.bias;
    const bool is_tied = layer.is_tied;
    layer = seen;
    layer.bias = bias;
    layer.is_tied = is_tied;
  }
  if (layer.is_transposed != seen.is_transposed || (layer.is_transposed && layer.is_tied)) {
    layer.problem = kUsedBothWays;
  } else if (layer.is_transposed_convolution != seen.is_transposed_convolution) {
    layer.problem = kConvolvedBothWays;
  } else if (layer.is_unitwise) {
    layer.problem = kNormAndOther;
  }
  if (!layer.problem.empty()) {
    return;
  }
  FactorSums& sums = sums_[impl];
  const FactorLayout layout = this->layout(weight, layer);
  const bool is_first = !sums.A.defined();
  if (is_first) {
    sums.A = empty_sum(weight.param, layout.sizes_A(weight.param));
    sums.G = empty_sum(weight.param, layout.sizes_G(weight.param));
    sums.A_is_of_gradients = layer.is_transposed_convolution;
  }
  const at::Tensor matrix = layout.matrix(weight.param);
  const StructuredSums structured = structured_sums(weight);
  gradients::detail::update_kronecker_factors_(sums.A, sums.G, call, matrix.sizes(),
                                               /*accumulate=*/!is_first, weight.sharing,
                                               factors_of(column), &structured);
  // Not from the diagonal of G, whose last bits are those of another sum.
  const bool may_be_table = call.kind == LayerKind::kLinear && !layer.is_transposed;
  if (!weight.G.defined() && may_be_table && layout.structures.G != Structure::kDiagonal) {
    if (!sums.G_diagonal.defined()) {
      sums.G_diagonal = at::zeros({layout.groups, layout.order_G(weight.param)}, sums.G.options());
    }
    gradients::detail::update_kronecker_factors_(sums.A, sums.G_diagonal, call, matrix.sizes(),
                                                 /*accumulate=*/true, weight.sharing,
                                                 UpdatedFactors::kOfGradients, &structured);
  }
  add_moments(weight, call, matrix.sizes(), sums);
  if (factors_of(column) == UpdatedFactors::kOfGradients) {
    return;
  }
  sums.count_samples(call, column);
  const at::Tensor& of_rows = sums.A_is_of_gradients ? call.input : call.output_gradient;
  sums.rows += weight.sharing == WeightSharing::kReduce
                   ? gradients::detail::samples_of(call).expect_int()
                   : of_rows.numel() / matrix.size(0);
}

void FactorRecords::record_lookup(const FactorWeight& weight, const LayerCall& call,
                                  const CurvatureColumn* column) {
  const auto* impl = weight.param.unsafeGetTensorImpl();
  const auto [known, is_new] = layers_.try_emplace(impl);
  FactorLayer& layer = known->second;
  layer.is_tied = true;
  layer.is_table = is_new || layer.is_table;
  layer.problem = layer.is_transposed ? kUsedBothWays : layer.problem;
  if (!layer.problem.empty()) {
    return;
  }
  FactorSums& sums = sums_[impl];
  const bool is_first = !sums.lookup_A.defined();
  if (is_first) {
    const FactorStructures structures = layout(weight, layer).structures;
    sums.lookup_A = empty_sum(
        weight.param,
        linalg::detail::stored_sizes(1, weight.param.size(1), structures.A, structures.block));
    sums.lookup_counts = empty_sum(weight.param, {1, weight.param.size(0)});
  }
  const StructuredSums structured = structured_sums(weight);
  gradients::detail::update_kronecker_factors_(
      sums.lookup_A, sums.lookup_counts, call, weight.param.sizes(), /*accumulate=*/!is_first,
      WeightSharing::kExpand, factors_of(column), &structured);
  if (factors_of(column) == UpdatedFactors::kBoth) {
    sums.samples_of_pass.try_emplace(call.micro_batch, 0);
    sums.lookups.push_back(
        {call.micro_batch, gradients::detail::samples_of(call).expect_int(), call.input.numel()});
  }
  add_moments(weight, call, weight.param.sizes(), sums);
}

void FactorRecords::record_norm(const FactorWeight& weight, const LayerCall& call,
                                const FactorLayer& seen, const CurvatureColumn* column) {
  const auto* impl = weight.param.unsafeGetTensorImpl();
  const auto [known, is_new] = layers_.try_emplace(impl);
  FactorLayer& layer = known->second;
  if (is_new) {
    layer.is_unitwise = true;
    layer.bias = is_joint_bias(seen.bias) ? at::Tensor() : seen.bias;
  } else if (!layer.is_unitwise) {
    layer.problem = kNormAndOther;
  } else if (has_another_bias(layer, seen)) {
    layer.problem = kSeveralBiases;
  }
  if (!layer.problem.empty()) {
    return;
  }
  FactorSums& sums = sums_[impl];
  const bool is_first = !sums.blocks.defined();
  const int64_t k = weight.blocks.defined() ? weight.blocks.size(-1) : layer.bias.defined() ? 2 : 1;
  at::Tensor blocks =
      is_first ? empty_sum(weight.param, {weight.param.numel(), k, k}) : sums.blocks;
  gradients::detail::update_fisher_blocks_(blocks, call, weight.param.sizes(),
                                           /*accumulate=*/!is_first, weight.sharing);
  sums.blocks = blocks;
  if (factors_of(column) == UpdatedFactors::kBoth) {
    sums.count_samples(call, column);
  }
}

void FactorRecords::settle_tables(bool is_shared) {
  std::map<int64_t, int64_t> samples_of_pass;  // as products have seen them
  for (const auto& [weight, sums] : sums_) {
    if (sums.blocks.defined()) {
      continue;
    }
    for (const auto& [pass, samples] : sums.samples_of_pass) {
      samples_of_pass[pass] = std::max(samples_of_pass[pass], samples);
    }
  }
  for (auto& [weight, sums] : sums_) {
    if (sums.A.defined() || !sums.lookup_A.defined()) {
      continue;
    }
    for (const auto& [pass, rows, count] : sums.lookups) {
      const int64_t seen = samples_of_pass[pass];
      if (seen != 0 && seen != rows && seen != count) {
        layers_.at(weight).problem = kSharedRows;
      }
      sums.samples_of_pass[pass] = std::max(sums.samples_of_pass[pass], seen != 0 ? seen : rows);
    }
    sums.A = std::exchange(sums.lookup_A, {});
    sums.G = std::exchange(sums.lookup_counts, {});
    if (!is_shared) {
      sums.G = sums.G / sums.G.sum().clamp_min(1);
    }
    sums.rows = 1;
    sums.is_of_table = sums.A_is_of_gradients = true;
  }
}

void FactorRecords::add_moments(const FactorWeight& weight, const LayerCall& call,
                                at::IntArrayRef weight_shape, FactorSums& sums) {
  if (!weight.basis.defined()) {
    return;
  }
  if (!sums.moments.defined()) {
    sums.moments = at::zeros({weight.G.size(0), weight.G.size(-1), weight.A.size(-1)},
                             weight.basis.G.options());
  }
  gradients::detail::add_eigenbasis_moments_(sums.moments, call, weight_shape, weight.basis);
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

void FactorRecords::note_new_bases() {
  for (auto& [weight, sums] : sums_) {
    sums.has_old_basis = sums.moments.defined();
  }
}

void FactorRecords::forget() { sums_.clear(); }

FactorSums* FactorRecords::sums(const FactorWeight& weight, bool is_shared) {
  const auto found = sums_.find(weight.param.unsafeGetTensorImpl());
  if (found == sums_.end() || !(found->second.A.defined() || found->second.blocks.defined())) {
    return nullptr;
  }
  FactorSums& sums = found->second;
  if (sums.blocks.defined()) {
    return &sums;
  }
  const FactorLayer* known = layer(weight.param);
  const bool has_diagonal_G =
      known != nullptr && layout(weight, *known).structures.G == Structure::kDiagonal;
  if (sums.G.dim() == 3 && has_diagonal_G) {  // looked up after the first product
    sums.G = sums.G_diagonal.defined() ? sums.G_diagonal
                                       : linalg::detail::structured_diagonal(sums.G).contiguous();
  }
  if (!is_shared && sums.lookup_A.defined() && sums.rows > 0) {
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

}  // namespace torchium::optim::detail
