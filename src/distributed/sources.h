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
  // Of _StridedShard: `dim` is cut into this many pieces, each of which is split over the ranks.
  int64_t split_factor = 1;

  friend bool operator==(const Placement&, const Placement&) = default;
};

// Rank r is at r / strides[m] % mesh[m] in dimension m, so that ranks that differ in no dimension
// of the mesh hold the same.
struct TORCHIUM_API Sharding {
  std::vector<int64_t> mesh;
  std::vector<Placement> placements;  // one per dimension of the mesh
  std::vector<int64_t> strides = {};  // empty: row-major
  int64_t ranks = 0;                  // of the group; 0: those of the mesh

  friend bool operator==(const Sharding&, const Sharding&) = default;
};

// A tensor of which each rank holds a part.
struct ShardedShape {
  std::vector<int64_t> shape;
  Sharding sharding;
};

struct Source {
  int64_t rank;
  Rectangle rectangle;
  // Where it begins in the tensor that the rank holds, in the same dimensions.
  std::vector<int64_t> local = {};
};

// The rectangles that each rank holds, ordered by rank. Pieces have the sizes of torch.chunk, so
// the last ones are smaller or empty. An empty shard has no rectangle; a strided one has several.
//
// `dims`: the shape after a view that drops unit dimensions and merges adjacent ones, in which the
// rectangles are. Where a part of an inner dimension is merged, there are several of them.
TORCHIUM_API std::vector<Source> sources(const std::vector<int64_t>& shape,
                                         const Sharding& sharding,
                                         const std::vector<int64_t>& dims);
TORCHIUM_API std::vector<Source> sources(const std::vector<int64_t>& shape,
                                         const Sharding& sharding);

// The shape of what a rank holds, in these dimensions.
TORCHIUM_API std::vector<int64_t> local_sizes(const std::vector<int64_t>& shape,
                                              const Sharding& sharding, int64_t rank,
                                              const std::vector<int64_t>& dims);

}  // namespace torchium::distributed
