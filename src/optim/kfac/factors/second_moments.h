// The second moments of EKFAC (George et al. 2018, arXiv 1806.03884) when the eigenbasis changes.
#pragma once

#include "optim/core/found_inf_guard.h"
#include "optim/kfac/damped_factors.h"

#include <deque>

namespace torchium::optim::detail {

// Before the layers take their new eigenvectors U': second_moments <- diagonal of
// U'^T (U diag(s) U^T) U', with U = U_G (x) U_A, or lambda_G lambda_A^T if s was never updated.
// Only where the new eigensystems of both factors were accepted. Layers without second moments are
// left out.
void renew_second_moments(const std::deque<DampedFactors>& layers, const FoundInfGuard& guard);

}  // namespace torchium::optim::detail
