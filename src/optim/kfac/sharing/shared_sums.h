// Sums of the factors over the samples of all ranks.
#pragma once

#include "distributed/communicator.h"
#include "optim/kfac/factors/factor_records.h"

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// E[a a^T], E[g g^T], the blocks of norms and the second moments of EKFAC over the samples of all
// ranks, from the sums over the samples of each, which become means (is_joint). All ranks must call
// this for the same layers. is_divided: the loss of each rank is the mean over its own N samples,
// so that its gradients count N times. Does not wait for a GPU. Without samples on any rank the
// means are NaN.
void sum_over_ranks(const distributed::Communicator& ranks, const std::vector<FactorSums*>& layers,
                    bool is_divided);

}  // namespace torchium::optim::detail
