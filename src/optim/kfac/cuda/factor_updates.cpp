#ifdef TORCHIUM_WITH_CUDA
#include "optim/kfac/cuda/factor_updates.h"

#include "optim/core/cuda/kernel_tensors.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

namespace torchium::optim::detail {

using cuda_kernels::FactorEntry;

FactorUpdates::FactorUpdates(const KfacGroup& group, const std::vector<size_t>& layers)
    : group_(group) {
  for (const size_t l : layers) {
    const KfacLayer& layer = group.layers[l];
    const auto add = [&](const at::Tensor& factor, bool counts) {
      const int64_t tiles =
          (factor.numel() + cuda_kernels::kFactorTile - 1) / cuda_kernels::kFactorTile;
      return tables_.add({.factor = floats(factor),
                          .sum = nullptr,
                          .updates = floats(layer.factor_updates),
                          .scale = 0.0,
                          .stat_decay = 0.0,
                          .elements = factor.numel(),
                          .first_tile = 0,
                          .counts = counts},
                         static_cast<int>(tiles));
    };
    const size_t A = add(layer.A, true);
    places_.push_back({l, A, add(layer.G, false)});
  }
}

// False: there are none.
bool FactorUpdates::set_sums() {
  bool any = false;
  for (const Place& place : places_) {
    const KfacLayer& layer = group_.layers[place.layer];
    any |= layer.has_sums();
    FactorEntry &A = tables_[place.A], &G = tables_[place.G];
    A.sum = floats(layer.A_sum);
    A.scale = layer.A_scale;
    A.stat_decay = layer.stat_decay;
    G.sum = floats(layer.G_sum);
    G.scale = layer.G_scale;
    G.stat_decay = layer.stat_decay;
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
}

}  // namespace torchium::optim::detail
#endif
