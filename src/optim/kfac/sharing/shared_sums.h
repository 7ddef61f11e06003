// Sums of the factors over the samples of all ranks.
#pragma once

#include "distributed/communicator.h"
#include "optim/kfac/factors/factor_records.h"

#include <vector>

namespace torchium::optim::detail {

// Sums of a a^T and g g^T, the blocks of norms and the second moments of EKFAC over the samples of
// all ranks, from the sums over the samples of each. All ranks must call this for the same layers.
// same_counts: all ranks have as many samples and rows of each layer, by which the host then
// divides (FactorSums::ranks). Otherwise, and for tables, the sums become means on the device
// (is_joint), NaN without samples on any rank; is_divided: the loss of each rank is the mean over
// its own N samples, so that its gradients count N times. Does not wait for a GPU.
void sum_over_ranks(const distributed::Communicator& ranks, const std::vector<FactorSums*>& layers,
                    bool is_divided, bool same_counts);

}  // namespace torchium::optim::detail
