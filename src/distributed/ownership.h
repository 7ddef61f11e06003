// Which rank owns which block, and what travels. Integers only: every rank computes the same plan,
// for any number of ranks, without communication.
#pragma once

#include "distributed/rectangle.h"
#include "distributed/sources.h"
#include "torchium/export.h"

#include <cstdint>
#include <vector>

namespace torchium::distributed {

// A part of a parameter that one rank preconditions.
struct Block {
  int64_t param;
  Rectangle rectangle;  // in the dimensions that the sources of the parameter are given in
  int64_t slot;         // the first of its slots in the state of the parameter; -1: no matrices
  int64_t cost;         // of one step
};

// Relative cost of a step for a block of these sizes with a matrix per mode: products for
// statistics and directions, and roots, which are due once in `frequency` steps.
TORCHIUM_API int64_t matrix_cost(const std::vector<int64_t>& sizes, int64_t frequency);
// The same for elements without matrices.
int64_t elementwise_cost(int64_t elements);

// The owner of each block. A block that lies wholly in one rank's rectangle stays there; of several
// such ranks, or of all if there are none, the one with the least work takes it, most
// expensive blocks first (longest processing time). Ties: the first block, the lowest rank.
// sources: of each parameter. load: the work that each rank has already; empty: none.
TORCHIUM_API std::vector<int64_t> assign_owners(const std::vector<Block>& blocks,
                                                const std::vector<std::vector<Source>>& sources,
                                                int64_t ranks, std::vector<int64_t> load = {});

// Elements of a block that lie together in the tensors of some ranks.
struct Part {
  struct Holder {
    int64_t rank;
    std::vector<int64_t> local;  // where the part begins in the rank's tensor
  };
  int64_t block;
  Rectangle rectangle;
  std::vector<Holder> holders;  // ordered by rank
  int64_t source;               // the holder whose gradient the owner of the block takes

  // Of a holder.
  const std::vector<int64_t>& local_on(int64_t rank) const;
};

// The parts of all blocks, in order. Of several holders the owner of the block is the source if it
// is among them, else the one that has sent least so far. Updates travel the other way, to all
// holders.
TORCHIUM_API std::vector<Part> parts_of(const std::vector<Block>& blocks,
                                        const std::vector<std::vector<Source>>& sources,
                                        const std::vector<int64_t>& owners, int64_t ranks);

}  // namespace torchium::distributed
