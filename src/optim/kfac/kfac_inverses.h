// Damped inverses and eigensystems of the Kronecker factors of K-FAC.
#pragma once

#include "optim/core/found_inf_guard.h"
#include "optim/kfac/kfac_layer.h"

#include <string>
#include <vector>

namespace torchium::optim::detail {

// Renews A_root, G_root and the eigenvalues of the layers with `wanted` (inverse_due or
// inverse_lost). Factors of one size are solved together. A pair (A, G) of a group is taken
// together or not at all: where one of the two fails, both old ones stay, and the failure is
// counted. root_method: "auto", "eigh" or "newton", see KFACOptions; kExact is by "eigh"
// always.
void update_inverses(std::vector<KfacLayer>& layers, bool KfacLayer::*wanted, DampingSplit split,
                     const std::string& root_method, const FoundInfGuard& guard);

}  // namespace torchium::optim::detail
