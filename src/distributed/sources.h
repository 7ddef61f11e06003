// Which elements of a tensor lie on which rank: DTensor's placements as integers. A tensor of
// DistributedDataParallel is replicated on a mesh of one dimension.
#pragma once

#include "distributed/rectangle.h"
#include "torchium/export.h"

#include <cstdint>
#include <vector>

namespace torchium::distributed {

// How one dimension of the mesh splits a tensor.
struct Placement {
  enum class Kind : uint8_t { kReplicate, kShard, kStridedShard };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;  // of the tensor
  // Of _StridedShard: `dim` is cut into so many pieces, and each of them over the ranks.
  int64_t split_factor = 1;
};

struct Sharding {
  std::vector<int64_t> mesh;          // ranks are numbered in row-major order
  std::vector<Placement> placements;  // one per dimension of the mesh
};

struct Source {
  int64_t rank;
  Rectangle rectangle;
};

// The rectangles that each rank holds, ordered by rank. Pieces have the sizes of torch.chunk, so
// the last ones are smaller or empty. An empty shard has no rectangle; a strided one has several.
TORCHIUM_API std::vector<Source> sources(const std::vector<int64_t>& shape,
                                         const Sharding& sharding);

}  // namespace torchium::distributed
