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

int64_t mesh_size(const Sharding& sharding) {
  return std::accumulate(sharding.mesh.begin(), sharding.mesh.end(), int64_t{1},
                         std::multiplies<>());
}

Segments strided_chunk(const Segments& segments, int64_t split_factor, int64_t count, int64_t i) {
  Segments result;
  for (int64_t piece = 0; piece < split_factor; ++piece) {
    for (const auto& [offset, size] : chunk(chunk(segments, split_factor, piece), count, i)) {
      if (!result.empty() && result.back().first + result.back().second == offset) {
        result.back().second += size;
      } else {
        result.emplace_back(offset, size);
      }
    }
  }
  return result;
}

// The segments that a rank holds, per dimension of the tensor.
std::vector<Segments> local_segments(const std::vector<int64_t>& shape, const Sharding& sharding,
                                     int64_t rank) {
  std::vector<Segments> local;
  for (const int64_t length : shape) {
    local.push_back({{0, length}});
  }
  int64_t row_major = mesh_size(sharding);
  for (size_t m = 0; m < sharding.mesh.size(); ++m) {
    row_major /= sharding.mesh[m];
    const int64_t stride = sharding.strides.empty() ? row_major : sharding.strides[m];
    const int64_t coordinate = rank / stride % sharding.mesh[m];
    const Placement& placement = sharding.placements[m];
    if (placement.kind == Placement::Kind::kReplicate) {
      continue;
    }
    Segments& segments = local[placement.dim];
    segments = placement.kind == Placement::Kind::kShard
                   ? chunk(segments, sharding.mesh[m], coordinate)
                   : strided_chunk(segments, placement.split_factor, sharding.mesh[m], coordinate);
  }
  return local;
}

// Indices (i, j), with i in `outer` and j in `inner`, as i length + j.
Segments merged(const Segments& outer, int64_t length, const Segments& inner) {
  Segments result;
  for (const auto& [begin, count] : outer) {
    if (inner == Segments{{0, length}}) {
      result.emplace_back(begin * length, count * length);
      continue;
    }
    for (int64_t i = begin; i < begin + count; ++i) {
      for (const auto& [offset, size] : inner) {
        result.emplace_back(i * length + offset, size);
      }
    }
  }
  return result;
}

// Segments per dimension of `shape` as segments per dimension of `dims`.
std::vector<Segments> after_merging(const std::vector<Segments>& parts,
                                    const std::vector<int64_t>& shape,
                                    const std::vector<int64_t>& dims) {
  if (dims == shape) {
    return parts;
  }
  std::vector<Segments> result;
  size_t d = 0;
  for (const int64_t length : dims) {
    Segments segments{{0, 1}};
    int64_t merged_length = 1;
    // Unit dimensions follow the dimension before them, or begin the first one.
    for (; d < shape.size() && (merged_length < length || shape[d] == 1); ++d) {
      segments = merged(segments, shape[d], parts[d]);
      merged_length *= shape[d];
    }
    result.push_back(std::move(segments));
  }
  return result;
}

// Offset, size, and offset in the rank's own tensor of the segments in each dimension, multiplied
// out.
void append_sources(std::vector<Source>& result, int64_t rank,
                    const std::vector<Segments>& segments) {
  std::vector<Source> products{{rank, {}, {}}};
  for (const Segments& of_dim : segments) {
    std::vector<Source> extended;
    for (const Source& source : products) {
      int64_t at = 0;
      for (const auto& [offset, size] : of_dim) {
        extended.push_back(source);
        extended.back().rectangle.offsets.push_back(offset);
        extended.back().rectangle.sizes.push_back(size);
        extended.back().local.push_back(at);
        at += size;
      }
    }
    products = std::move(extended);
  }
  for (Source& source : products) {
    if (source.rectangle.numel() > 0) {
      result.push_back(std::move(source));
    }
  }
}

}  // namespace

std::vector<Source> sources(const std::vector<int64_t>& shape, const Sharding& sharding,
                            const std::vector<int64_t>& dims) {
  const int64_t ranks = sharding.ranks != 0 ? sharding.ranks : mesh_size(sharding);
  std::vector<Source> result;
  if (whole(shape).numel() == 0) {
    return result;
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    append_sources(result, rank, after_merging(local_segments(shape, sharding, rank), shape, dims));
  }
  return result;
}

std::vector<Source> sources(const std::vector<int64_t>& shape, const Sharding& sharding) {
  return sources(shape, sharding, shape);
}

std::vector<int64_t> local_sizes(const std::vector<int64_t>& shape, const Sharding& sharding,
                                 int64_t rank, const std::vector<int64_t>& dims) {
  std::vector<int64_t> sizes;
  for (const Segments& segments :
       after_merging(local_segments(shape, sharding, rank), shape, dims)) {
    sizes.push_back(length_of(segments));
  }
  return sizes;
}

}  // namespace torchium::distributed
