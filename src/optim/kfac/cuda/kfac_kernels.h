// The steps of K-FAC by the kernels of a GPU, in a few launches for all parameters
// (cuda_kernels/optimizer_step/kfac_step.h) and two or four products for all layers of one shape.
#pragma once

#include "optim/kfac/kfac_subset.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

namespace torchium::optim::detail {

// Whether the kernels can take a layer with its weight and bias: on a GPU, with float32 state, and
// parameters that are contiguous, channels-last or a transposed matrix. Never in a build without
// CUDA.
bool has_kfac_kernels(const KfacGroup& group, const KfacLayer& layer);
// Whether they can take a norm: on a GPU, with contiguous parameters and float32 state.
bool has_kfac_kernels(const KfacGroup& group, const UnitwiseLayer& layer);
// Whether they can take a parameter of no layer: on a GPU, dense, with float32 state.
bool has_kfac_kernels(const KfacGroup& group, size_t param);

// For such layers and parameters; see make_eager_subset(). `prologue` is that of the group.
std::unique_ptr<KfacSubset> make_kfac_kernels(const KfacGroup& group, KfacMembers members,
                                              StepPrologue& prologue);

// min(1, sqrt(kl_clip / |sum of the terms|)), 0-dim float64; `terms` are not on the CPU.
at::Tensor kl_scale_on_device(double kl_clip, const at::Tensor& terms);

}  // namespace torchium::optim::detail
