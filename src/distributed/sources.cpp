#include "distributed/sources.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace torchium::distributed {
namespace {

using Segments = std::vector<std::pair<int64_t, int64_t>>;  // offset and size

int64_t length_of(const Segments& segments) {
  int64_t length = 0;
  for (const auto& [offset, size] : segments) {
    length += size;
  }
  return length;
}

// Places [begin, end) of the segments laid end to end.
Segments range_of(const Segments& segments, int64_t begin, int64_t end) {
  Segments result;
  int64_t at = 0;
  for (const auto& [offset, size] : segments) {
    const int64_t from = std::max(begin, at), to = std::min(end, at + size);
    if (from < to) {
      result.emplace_back(offset + from - at, to - from);
    }
    at += size;
  }
  return result;
}

// Piece i of torch.chunk(count).
Segments chunk(const Segments& segments, int64_t count, int64_t i) {
  const int64_t length = length_of(segments);
  const int64_t size = (length + count - 1) / count;
  return range_of(segments, std::min(i * size, length), std::min((i + 1) * size, length));
}

Segments strided_chunk(const Segments& segments, int64_t split_factor, int64_t count, int64_t i) {
  Segments result;
  for (int64_t piece = 0; piece < split_factor; ++piece) {
    const Segments part = chunk(chunk(segments, split_factor, piece), count, i);
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

// The segments that a rank holds, per dimension of the tensor.
std::vector<Segments> local_segments(const std::vector<int64_t>& shape, const Sharding& sharding,
                                     int64_t rank) {
  std::vector<int64_t> coordinates(sharding.mesh.size());
  for (size_t m = sharding.mesh.size(); m-- > 0;) {
    coordinates[m] = rank % sharding.mesh[m];
    rank /= sharding.mesh[m];
  }
  std::vector<Segments> local;
  for (const int64_t length : shape) {
    local.push_back({{0, length}});
  }
  for (size_t m = 0; m < sharding.mesh.size(); ++m) {
    const Placement& placement = sharding.placements[m];
    if (placement.kind == Placement::Kind::kReplicate) {
      continue;
    }
    Segments& segments = local[placement.dim];
    segments =
        placement.kind == Placement::Kind::kShard
            ? chunk(segments, sharding.mesh[m], coordinates[m])
            : strided_chunk(segments, placement.split_factor, sharding.mesh[m], coordinates[m]);
  }
  return local;
}

}  // namespace

std::vector<Source> sources(const std::vector<int64_t>& shape, const Sharding& sharding) {
  const int64_t ranks =
      std::accumulate(sharding.mesh.begin(), sharding.mesh.end(), int64_t{1}, std::multiplies<>());
  std::vector<Source> result;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<Rectangle> rectangles{Rectangle{}};
    for (const Segments& segments : local_segments(shape, sharding, rank)) {
      std::vector<Rectangle> extended;
      for (const Rectangle& rectangle : rectangles) {
        for (const auto& [offset, size] : segments) {
          extended.push_back(rectangle);
          extended.back().offsets.push_back(offset);
          extended.back().sizes.push_back(size);
        }
      }
      rectangles = std::move(extended);
    }
    for (Rectangle& rectangle : rectangles) {
      if (rectangle.numel() > 0) {
        result.push_back({rank, std::move(rectangle)});
      }
    }
  }
  return result;
}

}  // namespace torchium::distributed
