#ifdef TORCHIUM_WITH_CUDA
#include "optim/kfac/cuda/factor_updates.h"

#include "optim/core/cuda/kernel_tensors.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

namespace torchium::optim::detail {

using cuda_kernels::FactorEntry;

FactorUpdates::FactorUpdates(const KfacGroup& group, const KfacMembers& members) : group_(group) {
  const auto add = [&](const at::Tensor& factor, const at::Tensor& updates, bool counts) {
    const int64_t n = factor.size(-1);
    const bool is_symmetric =
        factor.dim() == 3 && factor.size(1) == n && n >= cuda_kernels::kFactorSide;
    const int order = is_symmetric ? static_cast<int>(n) : 0;
    return tables_.add({.factor = floats(factor),
                        .sum = nullptr,
                        .updates = floats(updates),
                        .scale = 0.0,
                        .stat_decay = 0.0,
                        .elements = factor.numel(),
                        .order = order,
                        .first_tile = 0,
                        .counts = counts},
                       cuda_kernels::factor_tiles(factor.numel(), order));
  };
  for (const size_t l : members.layers) {
    const KfacLayer& layer = group.layers[l];
    if (layer.is_inverse_free()) {
      continue;
    }
    const size_t A = add(layer.A, layer.factor_updates, true);
    places_.push_back({l, A, add(layer.G, layer.factor_updates, false)});
  }
  for (const size_t l : members.norms) {
    const UnitwiseLayer& norm = group.unitwise[l];
    norm_places_.push_back({l, add(norm.blocks, norm.factor_updates, true)});
  }
}

// False: there are none.
bool FactorUpdates::set_sums() {
  bool any = false;
  const auto set = [&](size_t entry, const at::Tensor& sum, double scale, double stat_decay) {
    tables_[entry].sum = floats(sum);
    tables_[entry].scale = scale;
    tables_[entry].stat_decay = stat_decay;
    any |= sum.defined();
  };
  for (const Place& place : places_) {
    const KfacLayer& layer = group_.layers[place.layer];
    set(place.A, layer.A_sum, layer.A_scale, layer.stat_decay);
    set(place.G, layer.G_sum, layer.G_scale, layer.stat_decay);
  }
  for (const NormPlace& place : norm_places_) {
    const UnitwiseLayer& norm = group_.unitwise[place.norm];
    set(place.blocks, norm.block_sum, norm.block_scale, norm.stat_decay);
  }
  return any;
}

void FactorUpdates::run(const cuda_kernels::StepControl* control) {
  if (!set_sums()) {
    return;
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (const auto& table : tables_) {
    C10_CUDA_CHECK(cuda_kernels::count_factor_updates(table, control, stream));
  }
  for (const auto& table : tables_) {
    C10_CUDA_CHECK(cuda_kernels::update_factors(table, control, stream));
  }
  for (const Place& place : places_) {
    const KfacLayer& layer = group_.layers[place.layer];
    if (layer.has_sums()) {
      note_change(layer.A);
      note_change(layer.G);
      note_change(layer.factor_updates);
    }
  }
  for (const NormPlace& place : norm_places_) {
    const UnitwiseLayer& norm = group_.unitwise[place.norm];
    if (norm.has_sums()) {
      note_change(norm.blocks);
      note_change(norm.factor_updates);
    }
  }
}

}  // namespace torchium::optim::detail
#endif
