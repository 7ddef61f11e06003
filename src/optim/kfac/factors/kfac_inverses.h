// Damped inverses and eigensystems of the Kronecker factors of K-FAC.
#pragma once

#include "optim/core/found_inf_guard.h"
#include "optim/kfac/kfac_layer.h"

#include <string>
#include <vector>

namespace torchium::optim::detail {

// Renews A_root, G_root and the eigenvalues of the layers with `wanted` (inverse_due or
// inverse_lost) that this rank inverts. Factors of one size are solved together. If A or G of a
// group fails, both keep their old roots, and the failure is counted. solver: of KFACOptions;
// kExact always uses "eigh".
void update_inverses(std::vector<KfacLayer>& layers, bool KfacLayer::*wanted, DampingSplit split,
                     const std::string& solver, const FoundInfGuard& guard);

}  // namespace torchium::optim::detail
