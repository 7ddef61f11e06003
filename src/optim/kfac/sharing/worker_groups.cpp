#include "optim/kfac/sharing/worker_groups.h"

#include <algorithm>
#include <cmath>

namespace torchium::optim::detail {

WorkerGroups::WorkerGroups(int64_t ranks, double fraction) : ranks_(ranks) {
  const int64_t workers = std::max<int64_t>(1, std::llround(fraction * static_cast<double>(ranks)));
  groups_ = (ranks + workers - 1) / workers;
}

std::pair<int64_t, int64_t> WorkerGroups::members_beside(int64_t rank) const {
  const int64_t group = group_of(rank);
  return {group * ranks_ / groups_, (group + 1) * ranks_ / groups_};
}

int64_t WorkerGroups::source(int64_t owner, int64_t rank) const {
  if (are_together(owner, rank)) {
    return rank;
  }
  const auto [first, last] = members_beside(owner);
  return first + rank % (last - first);
}

}  // namespace torchium::optim::detail
