// Which ranks compute the directions of a layer (KAISA: Pauloski et al. 2021, arXiv 2107.01739).
#pragma once

#include "torchium/export.h"

#include <cstdint>
#include <utility>

namespace torchium::optim::detail {

// Neighbouring ranks form groups. Each layer has an owner, which makes its inverses. The ranks in
// the group of the owner are the workers of the layer: they keep its inverses and compute its
// direction, which the ranks of other groups get from them. All workers of a layer have the same
// layers, and so the same batches of products: their directions are equal bit for bit.
class TORCHIUM_API WorkerGroups {
 public:
  // One rank.
  WorkerGroups() = default;
  // Of at most max(1, round(fraction ranks)) ranks each, as few groups as possible and as equal.
  // fraction in (0, 1]. 1: all ranks work for each layer; 1 / ranks: the owner alone.
  WorkerGroups(int64_t ranks, double fraction);

  int64_t ranks() const { return ranks_; }
  int64_t groups() const { return groups_; }
  // First rank and past the last one.
  std::pair<int64_t, int64_t> members_beside(int64_t rank) const;
  bool are_together(int64_t a, int64_t b) const { return group_of(a) == group_of(b); }
  // The worker from which `rank` gets the direction of a layer of this owner; a worker: itself.
  int64_t source(int64_t owner, int64_t rank) const;

 private:
  int64_t group_of(int64_t rank) const { return ((rank + 1) * groups_ - 1) / ranks_; }

  int64_t ranks_ = 1, groups_ = 1;
};

}  // namespace torchium::optim::detail
