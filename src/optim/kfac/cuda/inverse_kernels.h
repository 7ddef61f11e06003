// The work on factors before and after they are inverted, in one launch each for all layers.
#pragma once

#include "optim/core/found_inf_guard.h"
#include "optim/kfac/damped_factors.h"

#include <vector>

namespace torchium::optim::detail {

// Whether the kernels can take the layer: on a GPU, with contiguous float32 state. Never in a build
// without CUDA.
bool has_inverse_kernels(const KfacLayer& layer);

// As set_dampings() and take_accepted() of kfac_inverses.cpp, for such layers.
void set_dampings_by_kernel(const std::vector<DampedFactors*>& all, DampingSplit split);
void take_accepted_by_kernel(const std::vector<DampedFactors*>& all, const FoundInfGuard& guard);

}  // namespace torchium::optim::detail
